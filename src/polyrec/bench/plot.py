"""The picture of a run: latency and requests per second over the load, a colour per shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.files import atomic_path

_COLOURS = ("#2a6f97", "#e09f3e", "#5b8e7d", "#c8553d", "#7b6d8d", "#9aa5b1")
_INK = "#333a45"


def plot_load(results: Sequence[dict[str, Any]], path: str | Path, load: str) -> None:
    """Writes a PNG. results: of several cases; load: the field that is the x axis, `clients`, `batch` or `rate`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    latency, rate = figure.subplots(1, 2)
    shapes = dict.fromkeys((result["tokens"], result["n"]) for result in results)
    for number, (tokens, n) in enumerate(shapes):
        colour = _COLOURS[number % len(_COLOURS)]
        chosen = sorted(
            (one for one in results if (one["tokens"], one["n"]) == (tokens, n)), key=lambda one: float(one[load])
        )
        loads = [one[load] for one in chosen]
        label = f"{tokens:,} tokens, n {n}"
        latency.plot(loads, [one["p50_ms"] for one in chosen], "o-", color=colour, label=label)
        latency.fill_between(
            loads, [one["p50_ms"] for one in chosen], [one["p99_ms"] for one in chosen], color=colour, alpha=0.15
        )
        rate.plot(loads, [one["requests_per_second"] for one in chosen], "o-", color=colour, label=label)
    for panel, title in ((latency, "latency in ms: median, shaded up to p99"), (rate, "requests per second")):
        panel.set_title(title, color=_INK, fontsize=10, loc="left")
        panel.set_xlabel(load, color=_INK)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    latency.legend(frameon=False, fontsize=8)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
