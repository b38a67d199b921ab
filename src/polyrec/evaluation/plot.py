"""The picture of an evaluation: grouped bars with interval whiskers, a panel per protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.files import atomic_path

if TYPE_CHECKING:
    from .result import EvaluationResult

_COLOURS = ("#2a6f97", "#e09f3e", "#9aa5b1", "#7b6d8d", "#5b8e7d", "#c8553d")
_INK = "#333a45"


def plot_result(result: EvaluationResult, path: str | Path) -> None:
    """Writes a PNG: HR and NDCG at every k and Recall at the largest, one colour per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [f"NDCG@{k}" for k in result.ks] + [f"HR@{k}" for k in result.ks] + [f"Recall@{result.ks[-1]}"]
    count = len(result.protocols)
    figure = Figure(figsize=(1.6 + 6.2 * count, 4.6), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, squeeze=False)[0]
    methods = list(next(iter(result.protocols.values())).methods)
    width = 0.8 / len(methods)
    for panel, (name, protocol) in zip(panels, result.protocols.items(), strict=True):
        for number, method in enumerate(methods):
            found = [protocol.methods[method].metrics[metric] for metric in metrics]
            means = [interval.mean for interval in found]
            # A percentile interval may, on few users, leave the mean outside; a whisker cannot be negative.
            below = [max(interval.mean - interval.low, 0.0) for interval in found]
            above = [max(interval.high - interval.mean, 0.0) for interval in found]
            places = [place - 0.4 + width * (number + 0.5) for place in range(len(metrics))]
            panel.bar(
                places,
                means,
                width * 0.92,
                yerr=[below, above],
                label=method,
                color=_COLOURS[number % len(_COLOURS)],
                error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2, "alpha": 0.8},
                zorder=2,
            )
            for place, interval in zip(places, found, strict=True):
                label = f"{interval.mean:.3f}".removeprefix("0")
                panel.annotate(
                    label,
                    (place, max(interval.high, interval.mean)),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=7 if len(methods) < 4 else 5.5,
                    color=_INK,
                )
        panel.set_xticks(range(len(metrics)), metrics)
        panel.set_title(f"{name}  ({protocol.num_users:,} users)", fontsize=11, color=_INK, loc="left")
        panel.tick_params(colors=_INK, length=0, labelsize=9)
        panel.grid(axis="y", color="#e3e7ec", zorder=0)
        panel.margins(y=0.1)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.spines["bottom"].set_color("#b8c0ca")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(methods), frameon=False, fontsize=10)
    figure.supxlabel("whiskers: 95 % bootstrap intervals over users", fontsize=8, color="#6b7480")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
