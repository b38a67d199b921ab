"""How good a set of SIDs is: collisions, use of the codes, group sizes, and whether like items share a prefix.

JSON and PNG. matplotlib is imported inside `draw_report`, through its object interface: no display, no global figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import atomic_path
from .quantizer import Codebooks, code_space, encode

NEIGHBOURS = 10
QUERIES = 5_000  # neighbours are looked up for this many items at most; the share's standard error is then below 0.7 %


def quality_report(vectors: np.ndarray, codebooks: Codebooks, codes: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """JSON-able facts on the SIDs `codes` int [I, S] of the items with `vectors` float [I, D].

    collisions: items that share their SID with another, by nearest codes (before) and as given out (after).
    levels: codes in use, entropy in bits, and the share of the vectors' variance explained up to the level.
    groups: sizes of the groups of items with the same prefix. neighbours: share of the nearest items (Euclidean, in
    standardised space) with the same prefix, and the share that chance would give.
    """
    before, _ = encode(vectors, codebooks)
    standard = codebooks.standardise(vectors)
    num, depth = codes.shape
    sample = np.arange(num)
    if num > QUERIES:
        sample = np.sort(np.random.default_rng(seed).choice(num, QUERIES, replace=False))
    near = _neighbours(standard, sample, min(NEIGHBOURS, num - 1))
    levels, groups, neighbours = [], [], []
    residual, total = standard, max(float((standard.astype(np.float64) ** 2).sum()), 1e-12)
    for level in range(depth):
        residual = residual - codebooks.centroids[level][codes[:, level]]
        explained = 1 - float((residual.astype(np.float64) ** 2).sum()) / total
        levels.append(_level_facts(codes[:, level], codebooks.sizes[level]) | {"variance_explained": explained})
        _, group, sizes = np.unique(codes[:, : level + 1], axis=0, return_inverse=True, return_counts=True)
        group = group.reshape(-1)
        groups.append(_group_facts(level + 1, sizes))
        same = group[near] == group[sample][:, None]
        neighbours.append(
            {
                "prefix_length": level + 1,
                "nearest_share": float(same[:, 0].mean()) if same.size else 0.0,
                "nearest_10_share": float(same.mean()) if same.size else 0.0,
                "chance_share": float((sizes * (sizes - 1)).sum() / max(num * (num - 1), 1)),
            }
        )
    return {
        "num_items": num,
        "codebook_sizes": list(codebooks.sizes),
        "code_space": code_space(codebooks.sizes),
        "collisions": {
            "before": _collision_facts(before),
            "after": _collision_facts(codes),
            "items_moved": int((before != codes).any(axis=1).sum()),
            "items_moved_to_another_prefix": int((before[:, :-1] != codes[:, :-1]).any(axis=1).sum()),
        },
        "levels": levels,
        "groups": groups,
        "neighbours": neighbours,
    }


def draw_report(report: dict[str, Any], path: str | Path) -> None:
    """Four panels as PNG: collisions, use of the codes, group sizes, shared prefixes of neighbours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.4), layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    sizes = " × ".join(map(str, report["codebook_sizes"]))
    figure.suptitle(f"Semantic IDs of {report['num_items']:,} items, codebooks {sizes}", fontsize=14, weight="bold")
    _draw_collisions(axes[0, 0], report["collisions"], report["num_items"])
    _draw_levels(axes[0, 1], report["levels"])
    _draw_groups(axes[1, 0], report["groups"])
    _draw_neighbours(axes[1, 1], report["neighbours"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(11)
    with atomic_path(path) as temporary:
        canvas.print_png(str(temporary))


BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#e58a2b", "#4a9d5b", "#b8bec6"


def _neighbours(points: np.ndarray, sample: np.ndarray, k: int) -> np.ndarray:
    """Rows of the k nearest other points of each sampled one, nearest first: int64 [Q, k]."""
    if k < 1:
        return np.zeros((len(sample), 0), np.int64)
    found = np.empty((len(sample), k), np.int64)
    squares = (points**2).sum(axis=1)
    for start in range(0, len(sample), 256):
        rows = sample[start : start + 256]
        distance = squares - 2 * (points[rows] @ points.T)
        distance[np.arange(len(rows)), rows] = np.inf
        top = np.argpartition(distance, k - 1, axis=1)[:, :k]
        order = np.argsort(np.take_along_axis(distance, top, axis=1), axis=1, kind="stable")
        found[start : start + 256] = np.take_along_axis(top, order, axis=1)
    return found


def _level_facts(codes: np.ndarray, size: int) -> dict[str, Any]:
    counts = np.bincount(codes, minlength=size)
    share = counts[counts > 0] / len(codes)
    entropy = float(max(-(share * np.log2(share)).sum(), 0.0))
    return {
        "size": size,
        "codes_used": int((counts > 0).sum()),
        "entropy_bits": entropy,
        "entropy_share": entropy / float(np.log2(size)) if size > 1 else 1.0,
        "largest_code_items": int(counts.max()),
    }


def _group_facts(length: int, sizes: np.ndarray) -> dict[str, Any]:
    ranked = np.sort(sizes)[::-1]
    at = np.unique(np.geomspace(1, len(ranked), 60).astype(int)) - 1  # enough for a curve, few enough for JSON
    return {
        "prefix_length": length,
        "num_groups": len(sizes),
        "mean_items": float(sizes.mean()),
        "median_items": float(np.median(sizes)),
        "largest_items": int(ranked[0]),
        "curve": [[int(rank) + 1, int(ranked[rank])] for rank in at],
    }


def _collision_facts(codes: np.ndarray) -> dict[str, Any]:
    _, counts = np.unique(codes, axis=0, return_counts=True)
    shared = counts[counts > 1]
    by_size = np.bincount(np.minimum(counts, 6), weights=counts, minlength=7).astype(int)
    return {
        "distinct_sids": len(counts),
        "items_sharing": int(shared.sum()),
        "share": float(shared.sum() / len(codes)),
        "largest_group": int(counts.max()),
        "items_by_group_size": {**{str(size): int(by_size[size]) for size in range(1, 6)}, "6+": int(by_size[6])},
    }


def _draw_collisions(axis: Any, collisions: dict[str, Any], num_items: int) -> None:
    labels = list(collisions["before"]["items_by_group_size"])
    for offset, when, color in ((-0.2, "before", ORANGE), (0.2, "after", BLUE)):
        shares = [100 * count / num_items for count in collisions[when]["items_by_group_size"].values()]
        text = f"{when}: {collisions[when]['share']:.1%} of items collide"
        bars = axis.bar(np.arange(len(labels)) + offset, shares, 0.38, color=color, label=text)
        axis.bar_label(bars, [f"{share:.0f}" if share >= 0.5 else "" for share in shares], fontsize=8, color="#444444")
    axis.set_xticks(range(len(labels)), labels)
    axis.set(title="Collisions", xlabel="items on one SID", ylabel="% of items", ylim=(0, 112))
    axis.legend(frameon=False)


def _draw_levels(axis: Any, levels: list[dict[str, Any]]) -> None:
    place = np.arange(len(levels))
    facts = (
        (-0.27, GREY, "codes in use", [level["codes_used"] / level["size"] for level in levels]),
        (0.0, BLUE, "entropy, of the possible", [level["entropy_share"] for level in levels]),
        (0.27, GREEN, "variance explained so far", [level["variance_explained"] for level in levels]),
    )
    for offset, color, label, shares in facts:
        bars = axis.bar(place + offset, [100 * share for share in shares], 0.25, color=color, label=label)
        axis.bar_label(bars, [f"{100 * share:.0f}" for share in shares], fontsize=8, color="#444444")
    labels = [f"level {n + 1}\n{level['codes_used']} of {level['size']}" for n, level in enumerate(levels)]
    axis.set_xticks(place, labels)
    axis.set(title="Use of the codes", ylabel="%", ylim=(min(0, axis.get_ylim()[0]), 128), yticks=range(0, 101, 20))
    axis.legend(frameon=False, ncols=3, loc="upper center", fontsize=8, columnspacing=1.2, handlelength=1.2)


def _draw_groups(axis: Any, groups: list[dict[str, Any]]) -> None:
    for group, color in zip(groups, [BLUE, ORANGE, GREEN, *[GREY] * len(groups)], strict=False):
        rank, items = np.array(group["curve"]).T
        what = "whole SID" if group is groups[-1] else f"prefix of {group['prefix_length']}"
        label = f"{what}: {group['num_groups']:,} groups, mean {group['mean_items']:.1f}"
        axis.plot(rank, items, color=color, label=label, linewidth=2, drawstyle="steps-post")
    axis.set(title="Items per prefix", xlabel="groups, largest first", ylabel="items", xscale="log", yscale="log")
    axis.set_ylim(0.8, 4 * max(group["largest_items"] for group in groups))
    axis.grid(True, color="#eceff2", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=9)


def _draw_neighbours(axis: Any, neighbours: list[dict[str, Any]]) -> None:
    facts = (
        (-0.27, BLUE, "nearest item", "nearest_share"),
        (0.0, ORANGE, "10 nearest items", "nearest_10_share"),
        (0.27, GREY, "chance", "chance_share"),
    )
    shown = neighbours[:-1] or neighbours  # a whole SID is never shared: the items are apart
    for offset, color, label, key in facts:
        shares = [100 * level[key] for level in shown]
        bars = axis.bar(np.arange(len(shown)) + offset, shares, 0.25, color=color, label=label)
        axis.bar_label(bars, [f"{share:.1f}" for share in shares], fontsize=8, color="#444444")
    axis.set_xticks(range(len(shown)), [f"first code{'' if n == 0 else f's 1–{n + 1}'}" for n in range(len(shown))])
    top = max(100 * max(level[key] for level in shown for *_, key in facts), 1.0)
    axis.set(title="Neighbours that share a prefix", ylabel="% of neighbours", ylim=(0, 1.15 * top))
    axis.legend(frameon=False)
