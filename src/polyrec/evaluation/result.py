"""What an evaluation found, and its forms for machines and people: JSON, Markdown, a table in the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..core.files import atomic_path, read_json, write_json
from ..data.histories import Kind, Stage
from .metrics import Interval

PROTOCOL_MEANING = {
    "new": "items not bought before; bought ones are masked",
    "all": "everything that followed; nothing is masked",
}


@dataclass(frozen=True)
class MethodResult:
    """metrics: means over users with intervals (`NDCG@10`). rates: over the whole table of rankings (`Coverage@10`)."""

    metrics: dict[str, Interval]
    rates: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class ProtocolResult:
    """differences: `compared` minus each other method, paired by user, with intervals."""

    num_users: int
    methods: dict[str, MethodResult]
    compared: str
    differences: dict[str, dict[str, Interval]]


@dataclass(frozen=True)
class EvaluationResult:
    """Methods × protocols × metrics of one stage; intervals are 95 %, percentile bootstrap over users."""

    stage: Stage
    kind: Kind
    ks: tuple[int, ...]
    num_items: int
    seed: int
    samples: int
    protocols: dict[str, ProtocolResult]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; an interval is {mean, low, high}."""
        value = asdict(self)
        value["ks"] = list(self.ks)
        for name, protocol in self.protocols.items():
            for method, measured in protocol.methods.items():
                value["protocols"][name]["methods"][method]["metrics"] = _named(measured.metrics)
            value["protocols"][name]["differences"] = {
                other: _named(intervals) for other, intervals in protocol.differences.items()
            }
        return value

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> EvaluationResult:
        """The inverse of to_dict."""
        protocols = {}
        for name, protocol in value["protocols"].items():
            methods = {
                method: MethodResult(_intervals(found["metrics"]), dict(found["rates"]), found["seconds"])
                for method, found in protocol["methods"].items()
            }
            differences = {other: _intervals(found) for other, found in protocol["differences"].items()}
            protocols[name] = ProtocolResult(protocol["num_users"], methods, protocol["compared"], differences)
        return cls(**{**value, "ks": tuple(value["ks"]), "protocols": protocols})

    def save(self, folder: str | Path, name: str = "evaluation") -> list[Path]:
        """Writes `name`.json, .md and .png into the folder; returns their paths."""
        from .plot import plot_result

        folder = Path(folder)
        paths = [folder / f"{name}.{suffix}" for suffix in ("json", "md", "png")]
        write_json(paths[0], self.to_dict())
        with atomic_path(paths[1]) as temporary:
            temporary.write_text(self.to_markdown(), encoding="utf-8")
        plot_result(self, paths[2])
        return paths

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Reads what `save` wrote as JSON."""
        return cls.from_dict(read_json(path))

    def columns(self) -> list[str]:
        """The columns of the tables: HR and NDCG at every k, the rest at the largest."""
        top = self.ks[-1]
        hit_rates, gains = [f"HR@{k}" for k in self.ks], [f"NDCG@{k}" for k in self.ks]
        return [
            *hit_rates,
            f"Recall@{top}",
            *gains,
            f"MRR@{top}",
            f"Coverage@{top}",
            f"Novelty@{top}",
            f"Invalid@{top}",
        ]

    def to_markdown(self) -> str:
        """A table per protocol, intervals of the NDCG in brackets, and the paired differences beneath."""
        parts = [f"# Evaluation, stage {self.stage}\n"]
        for name in self.protocols:
            heading, rows, notes = self._tables(name)
            columns = self.columns()
            parts.append(f"## {heading}\n")
            parts.append("| method | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
            parts += ["| " + " | ".join(row) + " |" for row in rows]
            parts.append("")
            parts += [f"- {note}" for note in notes]
            parts.append("")
        parts.append(
            f"Full ranking over {self.num_items:,} items. Brackets: 95 % intervals, percentile bootstrap over users "
            f"({self.samples:,} draws, seed {self.seed})."
        )
        return "\n".join(parts) + "\n"

    def to_tables(self) -> list[Table]:
        """A rich table per protocol, 80 columns wide at most; the best value of a column is bold."""
        tables = []
        top = self.ks[-1]
        left_out = (f"MRR@{top}", f"Novelty@{top}")
        columns = [column for column in self.columns() if column not in left_out]
        for name, protocol in self.protocols.items():
            heading, _, notes = self._tables(name)
            for method, found in protocol.methods.items():
                interval = found.metrics[f"NDCG@{top}"]
                notes.append(f"NDCG@{top}, {method}: 95 % interval {interval.low:.4f} to {interval.high:.4f}")
            table = Table(title=heading, caption="\n".join(notes), title_justify="left", caption_justify="left")
            table.add_column("method", overflow="fold")
            for column in columns:
                table.add_column(column.replace("@", "\n@"), justify="right", no_wrap=True)
            best = [self._best(protocol, column) for column in columns]
            for method, found in protocol.methods.items():
                cells = [self._short(found, column) for column in columns]
                bold = [
                    f"[bold]{cell}[/]" if method in winners else cell for cell, winners in zip(cells, best, strict=True)
                ]
                table.add_row(method, *bold)
            tables.append(table)
        return tables

    def _short(self, found: MethodResult, column: str) -> str:
        text = self._cell(found, column).split(" ")[0]  # the intervals stand in the caption
        return text.removeprefix("0") if column in found.metrics else text

    def _tables(self, name: str) -> tuple[str, list[list[str]], list[str]]:
        protocol = self.protocols[name]
        heading = f"Protocol {name}: {PROTOCOL_MEANING[name]} ({protocol.num_users:,} users)"
        rows = [
            [method, *(self._cell(found, column) for column in self.columns())]
            for method, found in protocol.methods.items()
        ]
        metric = f"NDCG@{self.ks[-1]}"
        notes = []
        for other, differences in protocol.differences.items():
            difference = differences[metric]
            notes.append(
                f"{metric}, {protocol.compared} − {other}: {difference.mean:+.4f} "
                f"({difference.low:+.4f} to {difference.high:+.4f}, paired)"
            )
        return heading, rows, notes

    def _cell(self, found: MethodResult, column: str) -> str:
        if column in found.rates:
            value = found.rates[column]
            return f"{value:.1f}" if column.startswith("Novelty") else f"{value:.1%}"
        if column not in found.metrics:
            return "–"
        interval = found.metrics[column]
        text = f"{interval.mean:.4f}"
        return f"{text} [{interval.low:.4f}, {interval.high:.4f}]" if column == f"NDCG@{self.ks[-1]}" else text

    def _best(self, protocol: ProtocolResult, column: str) -> list[str]:
        if not all(column in found.metrics for found in protocol.methods.values()):
            return []
        top = max(found.metrics[column].mean for found in protocol.methods.values())
        return [method for method, found in protocol.methods.items() if found.metrics[column].mean == top]


def _named(intervals: dict[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: interval._asdict() for name, interval in intervals.items()}


def _intervals(named: dict[str, dict[str, float]]) -> dict[str, Interval]:
    return {name: Interval(**ends) for name, ends in named.items()}
