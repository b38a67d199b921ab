"""The quality report against counts made with plain loops, and its picture."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from polyrec.sid.quantizer import assign_unique, encode, fit_codebooks
from polyrec.sid.report import draw_report, quality_report


def make(num: int = 120, sizes: tuple[int, ...] = (8, 4, 8), seed: int = 0):
    vectors = np.random.default_rng(seed).standard_normal((num, 6)).astype(np.float32)
    codebooks = fit_codebooks(vectors, sizes)
    return vectors, codebooks, assign_unique(vectors, codebooks)


def test_collisions_match_a_count():
    vectors, codebooks, codes = make()
    found = quality_report(vectors, codebooks, codes)["collisions"]
    before = [tuple(row) for row in encode(vectors, codebooks)[0].tolist()]
    count = Counter(before)
    assert found["before"]["distinct_sids"] == len(count)
    assert found["before"]["items_sharing"] == sum(count[sid] > 1 for sid in before) > 0
    assert found["before"]["share"] == pytest.approx(sum(count[sid] > 1 for sid in before) / 120)
    assert found["before"]["largest_group"] == max(count.values())
    by_size = Counter(min(count[sid], 6) for sid in before)
    assert found["before"]["items_by_group_size"] == {
        ("6+" if size == 6 else str(size)): by_size[size] for size in range(1, 7)
    }
    assert found["after"]["items_sharing"] == 0
    assert found["after"]["distinct_sids"] == 120
    after = [tuple(row) for row in codes.tolist()]
    assert found["items_moved"] == sum(a != b for a, b in zip(before, after, strict=True))
    assert found["items_moved_to_another_prefix"] == sum(a[:-1] != b[:-1] for a, b in zip(before, after, strict=True))


def test_use_entropy_groups_and_variance_match_a_count():
    vectors, codebooks, codes = make(seed=1)
    report = quality_report(vectors, codebooks, codes)
    standard = (vectors - vectors.mean(axis=0, dtype=np.float64)) / vectors.std(axis=0, dtype=np.float64)
    for level, size in enumerate((8, 4, 8)):
        counts = Counter(codes[:, level].tolist())
        facts = report["levels"][level]
        assert (facts["size"], facts["codes_used"]) == (size, len(counts))
        entropy = -sum(n / 120 * math.log2(n / 120) for n in counts.values())
        assert facts["entropy_bits"] == pytest.approx(entropy)
        assert facts["entropy_share"] == pytest.approx(entropy / math.log2(size))
        assert facts["largest_code_items"] == max(counts.values())
        parts = [codebooks.centroids[lv][codes[:, lv]].astype(np.float64) for lv in range(level + 1)]
        left = ((standard - sum(parts)) ** 2).sum() / (standard**2).sum()
        assert facts["variance_explained"] == pytest.approx(1 - left, abs=1e-4)
        groups = Counter(tuple(row[: level + 1]) for row in codes.tolist())
        facts = report["groups"][level]
        assert (facts["num_groups"], facts["largest_items"]) == (len(groups), max(groups.values()))
        assert facts["mean_items"] == pytest.approx(120 / len(groups))
        ranked = sorted(groups.values(), reverse=True)
        assert all(ranked[rank - 1] == items for rank, items in facts["curve"])
        assert facts["curve"][0][0] == 1
        assert facts["curve"][-1][0] == len(groups)


def test_shared_prefixes_of_neighbours_match_a_search():
    vectors, codebooks, codes = make(seed=2)
    report = quality_report(vectors, codebooks, codes)
    standard = codebooks.standardise(vectors).astype(np.float64)
    distances = ((standard[:, None] - standard[None]) ** 2).sum(axis=2)
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, axis=1)[:, :10]
    for level in range(3):
        same = (codes[:, None, : level + 1] == codes[None, :, : level + 1]).all(axis=2)
        facts = report["neighbours"][level]
        assert facts["nearest_share"] == pytest.approx(same[np.arange(120), near[:, 0]].mean())
        assert facts["nearest_10_share"] == pytest.approx(np.take_along_axis(same, near, axis=1).mean())
        assert facts["chance_share"] == pytest.approx((same.sum() - 120) / (120 * 119))
    first = report["neighbours"][0]
    assert first["nearest_share"] > 2 * first["chance_share"]


def test_large_catalogs_are_sampled_the_same_way_each_time(monkeypatch):
    monkeypatch.setattr("polyrec.sid.report.QUERIES", 50)
    vectors, codebooks, codes = make(seed=3)
    first, again = quality_report(vectors, codebooks, codes), quality_report(vectors, codebooks, codes)
    assert first == again
    share = first["neighbours"][0]["nearest_share"] * 50
    assert share == pytest.approx(round(share))  # of 50 items, not of 120


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(8,), (4, 1, 4)])
def test_tiny_catalogs_have_a_report_and_a_picture(tmp_path, num, sizes):
    vectors, codebooks, codes = make(num, sizes)
    report = quality_report(vectors, codebooks, codes)
    assert json.loads(json.dumps(report)) == report
    draw_report(report, tmp_path / "report.png")
    from matplotlib.image import imread

    picture = imread(tmp_path / "report.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05
