"""Amazon reviews 2014 (Beauty, Sports): our measured rows beside the published ones, leave-one-out, full ranking.

The data are for research use and are not part of this project: `--data` names a folder with `Beauty/sequences.txt` and
`Sports/sequences.txt`, lines of `user item item …` in time order, item ids from 1.

    python benchmarks/amazon2014.py --data PATH/amazon2014 --dataset Beauty
    python benchmarks/amazon2014.py --data PATH/amazon2014 --dataset Beauty --work runs/beauty --train-steps 2400
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from facts import origin

from polyrec.cli.train import progress_events
from polyrec.core.errors import DataError
from polyrec.core.files import read_json, write_json
from polyrec.data.histories import FIT, TEST, VALIDATION, EvalSet, Histories, eval_set, known_before
from polyrec.data.loader import SamplingConfig
from polyrec.data.prepare import PrepareConfig, load_source, prepare
from polyrec.data.prompt import PromptConfig
from polyrec.engine.recommender import Recommender
from polyrec.evaluation.baselines import Baseline, Popularity, SequenceItemKNN
from polyrec.evaluation.metrics import bootstrap_intervals, per_user_metrics
from polyrec.hardware import get_hardware_backend
from polyrec.models.checkpoint import load_model
from polyrec.training.prepared import read_prepared
from polyrec.training.recipe import OptimConfig, TrainConfig
from polyrec.training.run import train

COLUMNS = ("Recall@5", "NDCG@5", "Recall@10", "NDCG@10")
ARTEFACT = (
    "Events of one day keep ASIN order in these files (about 43 % of Beauty users have validation and test on one day), "
    "which helps every method that reads order."
)
# R@5, N@5, R@10, N@10 as their sources print them; None where a source does not say.
PUBLISHED: dict[str, dict[str, tuple[float | None, ...]]] = {
    "Beauty": {
        "SASRec, BCE (TIGER paper)": (0.0387, 0.0249, 0.0605, 0.0318),
        "TIGER (paper)": (0.0454, 0.0321, 0.0648, 0.0384),
        "SASRec, full cross-entropy (public log)": (0.0635, 0.0454, 0.0897, 0.0539),
        "OneRec-Foundation 8B, fine-tuned (its README)": (None, None, 0.0924, None),
    },
    "Sports": {
        "TIGER (paper)": (0.0264, 0.0181, 0.0400, 0.0225),
        "OneRec-Foundation 8B (its README)": (None, None, 0.0547, None),
    },
}


def read_sequences(path: Path) -> Histories:
    """Leave-one-out histories: the last item is test, the one before validation, all others fit."""
    if not path.is_file():
        raise DataError(
            "sequences_missing", f"No file {path}.", "Give --data the folder that holds Beauty/ and Sports/."
        )
    users, sequences = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        user, *items = line.split()
        users.append(user)
        sequences.append(np.array(items, np.int32) - 1)
    lengths = np.array([len(sequence) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.concatenate(sequences)
    place = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)
    back = np.repeat(lengths, lengths) - 1 - place
    split = np.select([back == 0, back == 1], [TEST, VALIDATION], FIT).astype(np.int8)
    return Histories(users, offsets, items, place.astype(np.int32), split, int(items.max()) + 1, "sequence")


def baseline_rows(histories: Histories) -> dict[str, dict[str, object]]:
    """Counts from the fit parts alone; the history may include the validation item. Popularity both ways of masking."""
    known = known_before(histories, "validation")
    asked = eval_set(histories, "test")
    methods: list[tuple[str, Baseline, bool]] = [
        ("popularity, seen items kept", Popularity(), False),
        ("popularity", Popularity(), True),
        ("itemKNN A", SequenceItemKNN("A"), True),
        ("itemKNN B", SequenceItemKNN("B"), True),
    ]
    rows = {}
    for name, baseline, mask_seen in methods:
        rows[name] = measure(baseline.fit(known).rank(asked, 10, mask_seen), asked)
        print(f"measured {name}", flush=True)
    return rows


def generative_row(source: Path, work: Path, steps: int) -> tuple[str, dict[str, object]]:
    """Prepares, trains on the fit parts alone with a history of at most 20, and ranks; resumable, like any run."""
    backend = get_hardware_backend()
    events, items = str(source / "sequences.txt"), str(source / "items.tsv")
    config = PrepareConfig(events=events, items=items)
    prepared = read_prepared(prepare(load_source(config), work / "data", config))
    recipe = TrainConfig(
        model_config_file=str(Path(__file__).parent / "amazon2014_model.json"),
        prompt=PromptConfig(max_items=20),
        sampling=SamplingConfig(batch_size=256, drop_items=0.3),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=100),
        steps=steps,
        eval_every=max(1, steps // 10),
    )
    with progress_events() as told:
        model = train(prepared, work / "model", recipe, backend, events=told)
    finished = read_json(model / "run" / "finished.json")
    asked = eval_set(prepared.histories, "test")
    recommender = Recommender.from_pretrained(model, backend=backend)
    row = measure(recommender.rank_rows(asked, 10, True, beam_width=100), asked)
    parameters = sum(weight.numel() for weight in load_model(model, backend).parameters())
    facts = {"steps": finished["steps"], "training_seconds": finished["seconds"], "parameters": parameters}
    name = f"Polyrec, {parameters / 1e6:.2f} M parameters, {finished['seconds'] / 60:.0f} min on this CPU"
    return name, {**row, "run": facts}


def measure(ranked: np.ndarray, asked: EvalSet) -> dict[str, object]:
    """The four columns with 95 % intervals; ranked: int [N, >= 10]."""
    values = per_user_metrics(ranked, asked, (5, 10))
    intervals = bootstrap_intervals(np.stack([values[name] for name in COLUMNS], axis=1))
    return {name: interval._asdict() for name, interval in zip(COLUMNS, intervals, strict=True)}


def render(dataset: str, measured: dict[str, dict]) -> str:
    """A Markdown table: measured rows first, then the published."""
    lines = [f"| {dataset} | R@5 | N@5 | R@10 | N@10 |", "|---|---|---|---|---|"]
    for name, row in measured.items():
        lines.append(f"| {name} (measured) | " + " | ".join(_number(row[c]["mean"]) for c in COLUMNS) + " |")
    for name, values in PUBLISHED[dataset].items():
        lines.append(f"| {name} | " + " | ".join(_number(value) for value in values) + " |")
    return "\n".join([*lines, "", ARTEFACT])


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Beauty/ and Sports/")
    parser.add_argument("--dataset", choices=sorted(PUBLISHED), default="Beauty")
    parser.add_argument("--out", type=Path, help="JSON to write (default benchmarks/results/amazon2014_<dataset>.json)")
    parser.add_argument("--work", type=Path, default=Path("runs/amazon2014"), help="where the generative model is made")
    parser.add_argument(
        "--train-steps", type=int, default=0, help="train the generative model so long (0: leave it out)"
    )
    options = parser.parse_args()
    origin_facts = origin("amazon2014.py")
    histories = read_sequences(options.data / options.dataset / "sequences.txt")
    measured = baseline_rows(histories)
    if options.train_steps:
        name, row = generative_row(options.data / options.dataset, options.work / options.dataset, options.train_steps)
        measured[name] = row
    print(render(options.dataset, measured))
    results = Path(__file__).parent / "results"
    facts = {"users": histories.num_users, "items": histories.num_items, "events": len(histories.items)}
    published = {name: dict(zip(COLUMNS, row, strict=True)) for name, row in PUBLISHED[options.dataset].items()}
    write_json(
        options.out or results / f"amazon2014_{options.dataset.lower()}.json",
        {
            **origin_facts,
            "dataset": options.dataset,
            **facts,
            "measured": measured,
            "published": published,
            "note": ARTEFACT,
        },
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}".removeprefix("0")


if __name__ == "__main__":
    main()
