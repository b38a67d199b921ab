"""`polyrec verify model`: the table, its JSON, and the exit code."""

from __future__ import annotations

import json

import pytest

from polyrec.core.errors import CatalogError
from polyrec.testing.tiny import write_tiny_model
from polyrec.verify import quality


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_a_row_within_its_limits(polyrec, folder):
    result = polyrec("verify", "model", folder, "--users", 20)
    assert result.exit_code == 0, result.output
    for word in ("fp8 (activations float32) against float32", "overlap", "ndcg_kept", "0.85", "20 histories drawn"):
        assert word in result.stdout
    assert "missed" not in result.stdout


def test_a_limit_that_is_missed_is_exit_code_1(polyrec, folder, monkeypatch):
    monkeypatch.setattr(quality, "LEAST_OVERLAP", 1.1)
    result = polyrec("verify", "model", folder, "--users", 20, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert not answer["passed"]
    (row,) = answer["rows"]
    assert row["limits"]["overlap"] == 1.1 > row["measures"]["overlap"]
    assert "missed" in polyrec("verify", "model", folder, "--users", 20).stdout


def test_on_the_prepared_folder_of_the_model(polyrec, shop, folder):
    """A model that was barely trained, on few users: the row is measured on them, whatever it says."""
    result = polyrec("verify", "model", shop / "model", "--data", shop / "prepared", "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert "new items of the test" in row["basis"]
    assert 0 < row["measures"]["ndcg_plain"] < 1
    assert row["measures"]["ndcg_kept"] == pytest.approx(row["measures"]["ndcg_fp8"] / row["measures"]["ndcg_plain"])
    assert row["passed"] == (result.exit_code == 0)
    with pytest.raises(CatalogError) as caught:
        polyrec("verify", "model", folder, "--data", shop / "prepared")
    assert caught.value.code == "catalog_mismatch"
