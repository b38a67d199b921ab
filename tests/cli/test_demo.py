"""`polyrec demo` on the example shop instead of the bundled invoices: what it shows and leaves, and that a rerun reuses it."""

from __future__ import annotations

import re

import pytest

from polyrec.core.errors import PolyrecError
from polyrec.data import prepare
from polyrec.data.columns import ColumnMap
from polyrec.data.dataset import load_dataset
from polyrec.training import run


@pytest.fixture(scope="module")
def demos(shop, polyrec, tmp_path_factory):
    """(folder, what the first run printed, what the second printed, files' times before and after the second)."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    columns = ColumnMap(time="ordered_at")

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    with pytest.MonkeyPatch.context() as patch:
        data = load_dataset(shop / "events.csv", shop / "items.csv", columns=columns)
        patch.setattr(prepare, "load_source", lambda config: data)
        first = polyrec("demo", "--out", folder, "--steps", 2)
        before = times()
        second = polyrec("demo", "--out", folder, "--steps", 2)
        assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
        return folder, first.output, second.output, before, times()


def test_it_ends_with_tables_a_picture_a_customer_and_the_command(demos):
    folder, output, *_ = demos
    for words in ("Protocol new", "Protocol all", "popularity", "basket itemKNN", "Recall", "Coverage", "Invalid"):
        assert words in output
    assert "repeats, which are itemKNN's strength" in " ".join(output.split())
    assert len(re.findall(r"<s_a_\d+><s_b_\d+><s_c_\d+>", output)) == 10
    assert f"polyrec serve {folder / 'model'}" in output.replace("\n", "")
    assert (folder / "evaluation" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "model" / run.RUN / run.FINISHED).is_file()


def test_a_second_run_reuses_what_is_finished(demos):
    _, first, second, before, after = demos
    assert (first.count("is up to date"), second.count("is up to date")) == (0, 3)
    assert after == before


def test_a_run_stopped_while_evaluating_goes_on(shop, polyrec, demos, tmp_path, monkeypatch):
    """What Ctrl-C interrupts is made anew, what was finished before stays."""
    from polyrec.evaluation import result

    data = load_dataset(shop / "events.csv", shop / "items.csv", columns=ColumnMap(time="ordered_at"))
    monkeypatch.setattr(prepare, "load_source", lambda config: data)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(result.EvaluationResult, "save", interrupted)
        assert polyrec("demo", "--out", tmp_path / "out", "--steps", 1).exit_code == 130
    assert not (tmp_path / "out" / "evaluation").exists()
    again = polyrec("demo", "--out", tmp_path / "out", "--steps", 1)
    assert again.exit_code == 0
    assert again.output.count("is up to date") == 2


def test_another_demo_in_the_same_folder_is_refused_before_anything_is_touched(demos, polyrec):
    folder, *_, after = demos
    for flags in (["--steps", 2, "--seed", 1], ["--steps", 3]):
        with pytest.raises(PolyrecError) as caught:
            polyrec("demo", "--out", folder, *flags)
        assert caught.value.code == "out_has_another_demo"
    assert {path: path.stat().st_mtime_ns for path in after} == after


def test_a_place_that_is_taken_is_refused(polyrec, tmp_path):
    (tmp_path / "letters.txt").write_text("mine")
    for out, code in ((tmp_path, "out_occupied"), (tmp_path / "letters.txt" / "demo", "path_unusable")):
        with pytest.raises(PolyrecError) as caught:
            polyrec("demo", "--out", out)
        assert caught.value.code == code
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
