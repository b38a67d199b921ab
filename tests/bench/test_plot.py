"""What the pictures show."""

import pytest

from polyrec.bench.plot import plot_kernels, plot_load, plot_returning, stacked_ms

PERCENTILES = {"p50_ms": 5.0, "p90_ms": 6.0, "p99_ms": 9.5, "requests_per_second": 180.0}


def of_kernels(batch, gaps_ms, **families):
    rows = [{"family": name, "ms": ms} for name, ms in families.items()]
    return {"tokens": 1001, "n": 50, "batch": batch, "gaps_ms": gaps_ms, "roofline_ms": 2.5, "families": rows}


KERNELS = [of_kernels(1, 0.5, attention=2.0, products=1.0), of_kernels(8, -0.25, products=7.0, norms=0.5)]
VISITS = [
    {"visit": visit, "tokens": tokens, "n": 50, "clients": clients, **PERCENTILES}
    for clients in (1, 8)
    for visit, tokens in (("first_visit", 989), ("returning", 1001))
]
LOADS = [{"tokens": 1001, "n": 50, "clients": clients, **PERCENTILES} for clients in (1, 8)]


def test_families_are_stacked_alike_in_each_case_and_gaps_are_last_and_never_below_0():
    stacked = stacked_ms(KERNELS)
    assert [*stacked] == ["products", "attention", "norms", "gaps"]
    assert stacked == {"products": [1.0, 7.0], "attention": [2.0, 0.0], "norms": [0.0, 0.5], "gaps": [0.5, 0.0]}


@pytest.mark.parametrize("num", [1, 2])
def test_pictures_are_drawn_of_one_case_or_several(tmp_path, num):
    for draw, results in ((plot_kernels, KERNELS[:num]), (plot_returning, VISITS[: 2 * num])):
        path = tmp_path / f"{draw.__name__}.png"
        draw(results, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    plot_load(LOADS[:num], tmp_path / "load.png", "clients")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
