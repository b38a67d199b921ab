"""`polyrec evaluate`: the model beside the baselines; its figures against a plain recomputation; mistakes."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from polyrec.core.errors import PolyrecError
from polyrec.engine.recommender import Recommender


@pytest.fixture(scope="module")
def result(polyrec, shop, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation") / "out"
    flags = ["--out", out, "--json", "--samples", 50, "--ks", "3,10"]
    run = polyrec("evaluate", "--data", shop / "prepared", "--model", shop / "model", *flags)
    return json.loads(run.stdout), out


def test_it_writes_what_it_prints(result):
    printed, out = result
    assert sorted(path.name for path in out.iterdir()) == ["evaluation.json", "evaluation.md", "evaluation.png"]
    assert json.loads((out / "evaluation.json").read_text(encoding="utf-8")) == printed
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "evaluation.md").read_text(encoding="utf-8")
    assert all(name in text for name in ("Polyrec", "popularity", "basket itemKNN"))


def test_the_hit_rate_is_that_of_asking_for_each_user(result, shop):
    """The last order of each user, from the CSV itself; the history is what stands before it."""
    printed, _ = result
    recommender = Recommender.from_pretrained(shop / "model")
    hits = []
    events = pl.read_csv(shop / "events.csv").sort("ordered_at", "product_id")
    for _, user in events.group_by("customer_id", maintain_order=True):
        orders = [order["product_id"].to_list() for _, order in user.group_by("order_id", maintain_order=True)]
        if len(orders) > 1:
            found = recommender.recommend(orders[:-1], n=10, beam_width=50).item_ids
            hits.append(bool(set(found) & set(orders[-1])))
    found = printed["protocols"]["all"]
    assert found["num_users"] == len(hits)
    assert found["methods"]["Polyrec"]["metrics"]["HR@10"]["mean"] == pytest.approx(np.mean(hits), abs=1e-9)
    assert 0 < np.mean(hits) < 1


def test_a_table_on_the_terminal(polyrec, shop):
    flags = ["--data", shop / "prepared", "--protocol", "new", "--max-users", 40, "--samples", 20]
    baselines = polyrec("evaluate", *flags).stdout
    assert all(text in baselines for text in ("popularity", "basket itemKNN", "Protocol new"))
    assert not any(text in baselines for text in ("Polyrec", "Protocol all"))
    assert "Polyrec" in polyrec("evaluate", *flags, "--model", shop / "model").stdout


def test_a_tuned_baseline_is_the_best_of_its_grid_on_validation(polyrec, shop):
    flags = ["--data", shop / "prepared", "--stage", "validation", "--samples", 20, "--json"]
    usual, tuned = (json.loads(polyrec("evaluate", *flags, *more).stdout) for more in ([], ["--tune-baseline"]))

    def ndcg(result, protocol):
        return result["protocols"][protocol]["methods"]["basket itemKNN"]["metrics"]["NDCG@10"]["mean"]

    assert ndcg(tuned, "new") >= ndcg(usual, "new")
    assert tuned != usual


def test_mistakes(polyrec, shop, tmp_path):
    other = tmp_path / "other"
    events = ["--events", shop / "events.csv", "--time-column", "ordered_at"]
    polyrec("prepare", *events, "--basket-column", "none", "--item-column", "order_id", "--out", other)
    for flags, code in [
        (["--data", tmp_path / "absent"], "prepared_incomplete"),
        (["--data", shop / "prepared", "--ks", "ten"], "ks_invalid"),
        (["--data", shop / "prepared", "--model", tmp_path / "absent"], "model_folder_missing"),
        (["--data", shop / "prepared", "--out", shop / "events.csv" / "report"], "path_unusable"),
        (["--data", other, "--model", shop / "model"], "catalog_mismatch"),
    ]:
        with pytest.raises(PolyrecError) as caught:
            polyrec("evaluate", *flags)
        assert caught.value.code == code
