"""The pictures of runs: latency and rate over the load, a batch's time by family, first visits beside returning ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Sequence[dict[str, Any]]
GAPS = "gaps"
_COLOURS = (
    "#2a6f97",
    "#e09f3e",
    "#5b8e7d",
    "#c8553d",
    "#7b6d8d",
    "#9aa5b1",
    "#8ecae6",
    "#8a5a44",
    "#b7c66b",
    "#d98ba3",
)
_PALE = "#e6e9ed"
_INK = "#333a45"


def plot_load(results: Results, path: str | Path, load: str) -> None:
    """Writes a PNG. results: of several cases; load: the field that is the x axis, `clients`, `batch` or `rate`."""
    figure = _figure(4.4)
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
        panel.set_xlabel(load, color=_INK)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_ylim(bottom=0)
        _finish(panel, title)
    latency.legend(frameon=False, fontsize=8)
    _write(figure, path)


def plot_kernels(results: Results, path: str | Path) -> None:
    """Writes a PNG: of each case of `bench kernels` a bar of its families' ms, the gaps last, and a mark at its roofline."""
    figure = _figure(max(2.8, 1.6 + 0.5 * len(results)))  # the legend's lines must fit too
    panel = figure.subplots()
    places = range(len(results))
    ends = [0.0] * len(results)
    for number, (family, ms) in enumerate(stacked_ms(results).items()):
        colour = _PALE if family == GAPS else _COLOURS[number % len(_COLOURS)]
        panel.barh(places, ms, 0.6, left=ends, color=colour, label=family)
        ends = [end + more for end, more in zip(ends, ms, strict=True)]
    for place, one in zip(places, results, strict=True):
        label = "roofline" if place == 0 else None
        panel.plot([one["roofline_ms"]] * 2, [place - 0.4, place + 0.4], color=_INK, linewidth=2, label=label)
    panel.set_xlim(0, 1.05 * max([*ends, *(one["roofline_ms"] for one in results)]))
    _name_cases(panel, results, "batch")
    _finish(panel, "a batch's time in ms, by family of kernels")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    _write(figure, path)


def stacked_ms(results: Results) -> dict[str, list[float]]:
    """Family -> its ms in each case (0 where it has none), the family that takes most of all cases first, the gaps last.

    Where kernels fill more than the batch took without the profiler, there are no gaps: 0.
    """
    spent = [{row["family"]: row["ms"] for row in one["families"]} for one in results]
    families = sorted(
        {name for one in spent for name in one}, key=lambda name: -sum(one.get(name, 0.0) for one in spent)
    )
    found = {name: [one.get(name, 0.0) for one in spent] for name in families}
    return {**found, GAPS: [max(one["gaps_ms"], 0.0) for one in results]}


def plot_returning(results: Results, path: str | Path) -> None:
    """Writes a PNG: p50, p90 and p99 of each case of `bench cache`, of first visits beside returning ones."""
    returning = [one for one in results if one["visit"] == "returning"]
    figure = _figure(1.6 + 0.7 * len(returning))
    panels = figure.subplots(1, 3, sharey=True)
    for panel, percentile in zip(panels, ("p50", "p90", "p99"), strict=True):
        for visit, colour, above in (("first_visit", _COLOURS[0], -0.18), ("returning", _COLOURS[1], 0.18)):
            ms = [one[f"{percentile}_ms"] for one in results if one["visit"] == visit]
            places = [place + above for place in range(len(ms))]
            bars = panel.barh(places, ms, 0.34, color=colour, label=visit.replace("_", " "))
            panel.bar_label(bars, fmt="{:,.1f}", padding=2, fontsize=8, color=_INK)
        panel.margins(x=0.18)  # for the figures at the bars' ends
        _finish(panel, f"{percentile} in ms")
    _name_cases(panels[0], returning, "clients")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    _write(figure, path)


def _figure(height: float) -> Figure:
    """An empty one of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _name_cases(panel: Axes, results: Results, load: str) -> None:
    """Down the y axis, the first at the top."""
    names = [f"{one['tokens']:,} tokens, n {one['n']}, {load} {one[load]}" for one in results]
    panel.set_yticks(range(len(results)), names, color=_INK, fontsize=8)
    panel.set_ylim(len(results) - 0.5, -0.5)


def _finish(panel: Axes, title: str) -> None:
    panel.set_title(title, color=_INK, fontsize=10, loc="left")
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _write(figure: Figure, path: str | Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
