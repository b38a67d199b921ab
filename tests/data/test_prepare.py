"""The prepared folder and the prepare command: what is made, from which events, when it is reused, what is refused."""

import json
import subprocess
import sys
from datetime import datetime, timezone

import numpy as np
import polars as pl
import pytest
import typer
from typer.testing import CliRunner

from polyrec.cli.prepare import prepare as prepare_command
from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError, DataError, PolyrecError
from polyrec.core.files import file_digest, read_json
from polyrec.data.dataset import ColumnMap, load_dataset
from polyrec.data.histories import FIT, TEST, VALIDATION, known_before
from polyrec.data.interactions import load_histories, to_histories
from polyrec.data.prepare import STEPS, PrepareConfig, context_matrix, is_prepared, load_source, plan, prepare
from polyrec.sid.catalog import Catalog
from polyrec.sid.quantizer import Codebooks, assign_unique
from polyrec.sid.tokenizer import build_tokenizer, layout_of, load_tokenizer, save_tokenizer

FILES = {
    "prepare.json", "interactions.parquet", "histories.json", "catalog.parquet", "codebooks.safetensors", "vectors.npy",
    "tokenizer.json", "tokenizer_config.json", "sid_report.json", "sid_report.png",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Events and items of a small shop: 40 users, 30 items in 5 kinds, each user fond of one kind; baskets of 1 to 4."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(40):
        for basket in range(int(rng.integers(2, 7))):
            kind = user % 5 if rng.random() < 0.8 else int(rng.integers(0, 5))
            for item in rng.choice(6, int(rng.integers(1, 5)), replace=False):
                rows.append((f"u{user}", f"i{kind * 6 + item}", 1000 * user + basket, f"b{user}-{basket}"))
    pl.DataFrame(rows, ["user", "item", "time", "basket"], orient="row").write_csv(tmp_path / "events.csv")
    kinds = ["red mug", "blue plate", "paper bag", "tea towel", "glass jar"]
    items = [(f"i{i}", f"{kinds[i // 6]} {i % 6}", kinds[i // 6]) for i in range(32 - 2)] + [
        ("new", "red mug 9", "red mug")
    ]
    pl.DataFrame(items, ["item", "name", "text"], orient="row").write_csv(tmp_path / "items.csv")
    return tmp_path


def shop(files, **columns):
    return load_dataset(files / "events.csv", files / "items.csv", columns=ColumnMap(**columns))


def test_the_folder_is_whole_and_fits_together(files):
    data = shop(files)
    out = prepare(data, files / "out", PrepareConfig(seed=3))
    assert {path.name for path in out.iterdir()} == FILES
    catalog, histories = Catalog.load(out / "catalog.parquet"), load_histories(out)
    codebooks, vectors = Codebooks.load(out / "codebooks.safetensors"), np.load(out / "vectors.npy")
    record = read_json(out / "prepare.json")
    assert list(catalog.item_ids) == data.items["item"].to_list()
    assert catalog.names[catalog.row("i7")] == "blue plate 1"
    assert vectors.shape[0] == len(catalog) == histories.num_items == 31
    np.testing.assert_array_equal(catalog.codes, assign_unique(vectors, codebooks))
    expected = to_histories(data, list(catalog.item_ids))
    np.testing.assert_array_equal(histories.items, expected.items)
    np.testing.assert_array_equal(histories.split, expected.split)
    fit = histories.items[histories.split == FIT]
    np.testing.assert_array_equal(catalog.counts, np.bincount(fit, minlength=31))
    layout = layout_of(load_tokenizer(out))
    assert layout.codebook_sizes == codebooks.sizes
    assert record["sid_layout"] == layout.to_dict()
    assert record["fingerprint"] == Catalog.fingerprint(codebooks.sizes, codebooks.digest())
    assert record["config"]["seed"] == 3
    assert record["plan"]["vectors"] == "joined"
    assert record["plan"]["split_events"]["fit"] == len(fit)
    assert record["data_digest"] == data.digest
    assert record["data_report"] == json.loads(json.dumps(data.report.to_dict()))
    assert set(record["versions"]) >= {"polyrec", "numpy", "faiss-cpu", "python"}
    assert make_settings(PrepareConfig, record["config"]) == PrepareConfig(seed=3)
    # The item without an event sits with the items that read like it.
    mugs = [catalog.codes[catalog.row(f"i{i}")][0] for i in range(6)]
    assert catalog.codes[catalog.row("new")][0] in mugs


def test_vectors_know_nothing_of_what_is_evaluated(files):
    """Validation and test events may change without moving a SID; fit+validation reads validation too, never test."""
    data = shop(files)
    order = data.items["item"].to_list()
    split = to_histories(data, order).split
    other = np.random.default_rng(1).permutation(order[:30] * 40)[: len(split)]

    def changed(labels):
        touched = pl.Series(np.isin(split, labels))
        item = pl.select(pl.when(touched).then(pl.Series(other)).otherwise(data.events["item"])).to_series()
        return type(data)(data.events.with_columns(item.alias("item")), data.items, data.kind, data.report, "other")

    def made(data, **config):
        out = prepare(data, files / "out", PrepareConfig(**config), force=True)
        return file_digest(out / "vectors.npy"), file_digest(out / "catalog.parquet")

    assert made(data) == made(changed([VALIDATION, TEST]))
    assert made(data) != made(changed([FIT]))
    late = {"vectors_from": "fit+validation"}
    assert made(data, **late) == made(changed([TEST]), **late)
    assert made(data, **late) != made(changed([VALIDATION]), **late)


def test_contexts_are_baskets_or_windows(files):
    data = shop(files)
    histories = known_before(to_histories(data, data.items["item"].to_list()), "validation")
    order = {item: row for row, item in enumerate(data.items["item"])}
    kept = data.events.filter(pl.Series(to_histories(data, list(order)).split == FIT))
    expected = {tuple(sorted(order[i] for i in items)) for items in kept.group_by("user", "basket").agg("item")["item"]}
    got = context_matrix(histories, window=5).tolil().rows
    assert {tuple(sorted(row)) for row in got} == expected
    assert len(got) == kept.select(pl.struct("user", "basket").n_unique()).item()
    single = to_histories(data, list(order), split="leave-one-out")
    assert context_matrix(single, window=2).sum(axis=1).max() == 2


def test_the_same_again_is_reused_and_any_difference_is_not(files):
    data, out = shop(files), files / "out"
    prepare(data, out, PrepareConfig())
    stamp = (out / "prepare.json").stat().st_mtime_ns
    steps: list[str] = []
    assert prepare(data, out, PrepareConfig(), on_step=steps.append) == out
    assert (steps, (out / "prepare.json").stat().st_mtime_ns) == ([], stamp)
    prepare(
        data, out, PrepareConfig(events="elsewhere.csv"), on_step=steps.append
    )  # the same events from another place
    assert steps == []
    before = {name: file_digest(out / name) for name in FILES - {"prepare.json"}}
    prepare(data, out, PrepareConfig(), force=True, on_step=steps.append)
    assert tuple(steps) == STEPS
    assert {name: file_digest(out / name) for name in FILES - {"prepare.json"}} == before  # bit for bit
    for change in ({"seed": 1}, {"dim": 5}, {"depth": 2}, {"codebook_sizes": (8, 8, 8)}, {"vectors": "text"}):
        assert not is_prepared(data, out, PrepareConfig(**change))
    half = load_dataset(files / "events.csv", None)
    assert not is_prepared(half, out, PrepareConfig())
    own = files / "own.npy"
    np.save(own, np.random.default_rng(0).standard_normal((31, 4)))
    config = PrepareConfig(vectors=str(own))
    prepare(data, out, config)
    assert is_prepared(data, out, config)
    np.save(own, np.random.default_rng(1).standard_normal((31, 4)))
    assert not is_prepared(data, out, config)


def test_auto_takes_what_there_is(files):
    def kind(data):
        return read_json(prepare(data, files / "out", force=True) / "prepare.json")["plan"]["vectors"]

    assert kind(shop(files)) == "joined"
    assert kind(load_dataset(files / "events.csv")) == "cooccurrence"
    alone = "user,item\n" + "".join(
        f"u{u},i{i}\n" for u in range(4) for i in (7 * u % 30, (7 * u + 1) % 30, (7 * u + 2) % 30)
    )
    (files / "events.csv").write_text(alone)  # one fit event per user: no pairs
    assert kind(shop(files)) == "text"
    with pytest.raises(DataError) as caught:
        kind(load_dataset(files / "events.csv"))
    assert caught.value.code == "nothing_to_vectorise"


def test_an_existing_tokenizer_is_extended(files):
    old = build_tokenizer((2,))
    texts = {"<s_a_0>": "hello", "<s_a_1>": "world", "<|sid_begin|>": "x", "<|sid_end|>": "y"}
    (files / "hf").mkdir()
    save_tokenizer(old, files / "hf")
    content = (files / "hf" / "tokenizer.json").read_text()
    for sid, word in texts.items():
        content = content.replace(sid, word)
    (files / "hf" / "tokenizer.json").write_text(content)
    out = prepare(shop(files), files / "out", PrepareConfig(tokenizer=str(files / "hf"), codebook_sizes=(6, 7)))
    extended = load_tokenizer(out)
    assert extended.token_to_id("world") == load_tokenizer(files / "hf").token_to_id("world")
    assert layout_of(extended).level_starts == (6, 12)


def test_a_foreign_folder_is_left_alone_and_a_failure_leaves_nothing(files):
    data = shop(files)
    (files / "mine").mkdir()
    (files / "mine" / "thesis.txt").write_text("years of work")
    for out in (files / "mine", files / "mine" / "thesis.txt"):
        with pytest.raises(ConfigError) as caught:
            prepare(data, out, force=True)
        assert caught.value.code == "out_occupied"
    assert (files / "mine" / "thesis.txt").read_text() == "years of work"
    before = {path.name for path in files.iterdir()}

    def stop(name):
        if name == "files":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, files / "out", on_step=stop)
    assert {path.name for path in files.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "error", "code"),
    [
        ({"vectors": "words"}, ConfigError, "config_invalid"),
        ({"depth": 0}, ConfigError, "config_invalid"),
        ({"dimm": 3}, ConfigError, "config_invalid"),
        ({"depth": 2, "codebook_sizes": [4, 4, 4]}, ConfigError, "codebook_sizes"),
        ({"codebook_sizes": [4, 0, 4]}, ConfigError, "codebook_sizes"),
        ({"codebook_sizes": [3, 3, 3]}, ConfigError, "codebook_sizes"),
        ({"codebook_sizes": 64}, ConfigError, "config_invalid"),
        ({"codebook_sizes": "64,64"}, ConfigError, "config_invalid"),
        ({"codebook_sizes": []}, ConfigError, "config_invalid"),
        ({"columns": "user"}, ConfigError, "config_invalid"),
        ({"vectors": "gone.npy"}, ConfigError, "vectors_missing"),
        ({"tokenizer": "gone"}, PolyrecError, "tokenizer_missing"),
    ],
)
def test_settings_that_cannot_be_are_refused(files, config, error, code):
    with pytest.raises(error) as caught:
        prepare(shop(files), files / "out", make_settings(PrepareConfig, config))
    assert caught.value.code == code
    assert caught.value.remedy
    assert not (files / "out").exists()


def test_the_plan_is_what_is_made(files):
    data = shop(files)
    for config in (PrepareConfig(), PrepareConfig(depth=2), PrepareConfig(codebook_sizes=(4, 5, 6), vectors="text")):
        expected = plan(data, config)
        record = read_json(prepare(data, files / "out", config) / "prepare.json")
        assert {key: record["plan"][key] for key in expected} == expected


def test_exactly_one_source_is_asked_for(files):
    for config, code in (
        ({}, "source_missing"),
        ({"dataset": "online-retail", "events": "e.csv"}, "source_twice"),
        ({"dataset": "online-retail", "items": "i.csv"}, "source_twice"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_source(PrepareConfig(**config))
        assert caught.value.code == code


def run_command(*arguments: str):
    app = typer.Typer()
    app.command()(prepare_command)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_prepares_says_so_and_reuses(files):
    source = ("--events", files / "events.csv", "--items", files / "items.csv", "--out", files / "out")
    dry = run_command(*source, "--dry-run", "--json", "--codebook-sizes", "4,5,6")
    summary = json.loads(dry.stdout)
    assert summary["status"] == "dry run"
    assert summary["plan"]["codebook_sizes"] == [4, 5, 6]
    assert not (files / "out").exists()
    assert "nothing was written" in run_command(*source, "--dry-run").stdout
    first = run_command(*source)
    assert first.exit_code == 0, first.output
    assert "is ready" in " ".join(first.stdout.split())  # lines end where the path of the folder lets them
    assert "up to date" in run_command(*source).stdout
    assert json.loads(run_command(*source, "--json").stdout)["status"] == "up to date"
    again = json.loads(run_command(*source, "--json", "--force").stdout)
    assert again["status"] == "prepared"
    assert again["collisions"]["after"]["share"] == 0
    assert again["plan"]["num_items"] == 31


def test_flags_win_over_the_config_file(files):
    (files / "prepare.yaml").write_text(
        f"events: {files / 'events.csv'}\nitems: {files / 'items.csv'}\nseed: 5\ndim: 7\nvectors: text\n"
        "codebook_sizes: [8, 8]\ncolumns: {user: user, item: wrong}\n"
    )
    arguments = ["--config", files / "prepare.yaml", "--out", files / "out", "--json"]
    wrong = run_command(*arguments)
    assert isinstance(wrong.exception, DataError)
    assert wrong.exception.code == "column_missing"
    result = run_command(*arguments, "--item-column", "item", "--seed", "6", "--depth", "4", "--text-column", "name")
    assert result.exit_code == 0, result.output
    config = read_json(files / "out" / "prepare.json")["config"]
    assert (config["seed"], config["dim"], config["vectors"], config["depth"]) == (6, 7, "text", 4)
    assert config["columns"]["user"] == "user"
    assert config["columns"]["text"] == ["name"]
    bad = run_command("--out", files / "x", "--dataset", "online-retail", "--codebook-sizes", "many")
    assert isinstance(bad.exception, ConfigError)


@pytest.mark.parametrize(
    "setting", ["codebook_sizes: 64", "columns: user", "columns: [user]", "depth: [3]", "split: 3"]
)
@pytest.mark.parametrize("flags", [(), ("--user-column", "user", "--seed", "1")])
def test_values_of_the_wrong_kind_in_the_config_file_are_told(files, setting, flags):
    (files / "prepare.yaml").write_text(f"events: {files / 'events.csv'}\n{setting}\n")
    result = run_command("--config", files / "prepare.yaml", "--out", files / "out", *flags)
    assert isinstance(result.exception, ConfigError)
    assert setting.partition(":")[0] in result.exception.message
    assert "prepare.yaml" in result.exception.message


def test_online_retail_is_prepared_from_the_bundled_data(tmp_path):
    result = run_command("--dataset", "online-retail", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["plan"]["num_items"] == 3659
    assert summary["plan"]["codebook_sizes"] == [64, 64, 64]
    assert summary["plan"]["kind"] == "basket"
    assert 0.2 < summary["collisions"]["before"]["share"] < 0.6
    assert summary["collisions"]["after"]["share"] == 0
    assert summary["neighbours"][0]["nearest_share"] > 0.7


def test_help_loads_neither_numpy_nor_polars():
    code = "import sys, polyrec.cli.prepare\nassert not {'numpy', 'polars', 'torch', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_time_split_starts_where_the_user_says():
    config = PrepareConfig(
        dataset="online-retail", split="time", validation_from="2011-10-01", test_from="2011-11-01T12:00:00+01:00"
    )
    first = datetime(2011, 10, 1, tzinfo=timezone.utc)
    second = datetime(2011, 11, 1, 11, tzinfo=timezone.utc)
    assert config.boundaries == (first.timestamp() * 1e6, second.timestamp() * 1e6)
    dataset = load_source(config)
    histories = to_histories(dataset, dataset.items["item"].to_list(), "time", boundaries=config.boundaries)
    started = dataset.events.with_columns(pl.col("time").min().over("user", "basket"))["time"].to_numpy()
    expected = (started >= config.boundaries[0]).astype(int) + (started >= config.boundaries[1])
    np.testing.assert_array_equal(histories.split, expected)


@pytest.mark.parametrize("change", [{"split": "time", "test_from": "2011-11-01"}, {"test_from": "2011-11-01"}])
def test_half_a_time_split_is_refused(change):
    with pytest.raises(ConfigError) as error:
        PrepareConfig(dataset="online-retail", **change)
    assert error.value.code == "split_times"
