"""The catalog: look-ups against dictionaries, files, refusals, and what it may import."""

import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from polyrec.core.errors import CatalogError
from polyrec.sid.catalog import Catalog


def random_catalog(seed: int = 0, num: int = 50) -> Catalog:
    rng = np.random.default_rng(seed)
    codes = np.unique(rng.integers(0, 9, (4 * num, 3)), axis=0)
    rng.shuffle(codes)
    names = [None if row % 7 == 0 else f"Näme «{row}»" for row in range(num)]
    return Catalog([f"item {row * 37 % 101}" for row in range(num)], codes[:num], names, rng.integers(0, 9, num))


def test_look_ups_match_a_search():
    catalog = random_catalog()
    assert len(catalog) == 50
    assert catalog.depth == 3
    for row, item in enumerate(catalog.item_ids):
        assert catalog.row(item) == row
        assert catalog.row_of_codes(catalog.codes[row]) == row
        assert catalog.row_of_codes(tuple(int(code) for code in catalog.codes[row])) == row
    assert catalog.row("unknown") is None
    assert catalog.rows(["unknown", catalog.item_ids[3]]).tolist() == [-1, 3]
    known = {tuple(codes) for codes in catalog.codes.tolist()}
    for codes in np.ndindex(9, 9, 9):
        assert (catalog.row_of_codes(codes) is not None) == (codes in known)
    assert catalog.row_of_codes(catalog.codes[0][:2]) is None


def test_popular_items_come_first_and_ties_in_row_order():
    catalog = random_catalog(1)
    expected = sorted(range(50), key=lambda row: (-catalog.counts[row], row))
    assert catalog.popular(7).tolist() == expected[:7]
    assert catalog.popular(99).tolist() == expected


def test_a_saved_catalog_comes_back(tmp_path):
    catalog = random_catalog(2)
    catalog.save(tmp_path / "catalog.parquet")
    loaded = Catalog.load(tmp_path / "catalog.parquet")
    assert list(loaded.item_ids) == list(catalog.item_ids)
    assert list(loaded.names) == list(catalog.names)
    assert loaded.codes.dtype == np.int32
    np.testing.assert_array_equal(loaded.codes, catalog.codes)
    np.testing.assert_array_equal(loaded.counts, catalog.counts)
    table = pl.read_parquet(tmp_path / "catalog.parquet")
    assert dict(table.schema) == {
        "item_id": pl.String,
        "name": pl.String,
        "count": pl.Int64,
        "sid": pl.List(pl.Int32),
    }


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"item_ids": ["a", "b", "a"]}, "item_repeated"),
        ({"codes": np.array([[0, 1], [1, 1], [0, 1]])}, "sid_repeated"),
        ({"codes": np.zeros((2, 2))}, "catalog_shape"),
        ({"codes": np.zeros((3, 0))}, "catalog_shape"),
        ({"codes": np.arange(3)}, "catalog_shape"),
        ({"names": [None]}, "catalog_shape"),
        ({"counts": np.zeros(4)}, "catalog_shape"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, code):
    fields = {"item_ids": ["a", "b", "c"], "codes": np.eye(3, dtype=int), "names": [None] * 3, "counts": np.zeros(3)}
    Catalog(**fields)
    with pytest.raises(CatalogError) as caught:
        Catalog(**(fields | change))
    assert caught.value.code == code


def test_a_catalog_without_items_is_refused():
    with pytest.raises(CatalogError) as caught:
        Catalog([], np.zeros((0, 3)), [], np.zeros(0))
    assert caught.value.code == "catalog_empty"


def test_files_that_are_no_catalog_are_refused(tmp_path):
    path = tmp_path / "catalog.parquet"
    with pytest.raises(CatalogError) as caught:
        Catalog.load(path)
    assert caught.value.code == "catalog_missing"
    path.write_text("no parquet")
    good = {"item_id": ["a", "b"], "name": ["x", None], "count": [1, 2], "sid": [[0, 1], [1, 0]]}
    tables = [
        None,
        {key: value for key, value in good.items() if key != "sid"},
        good | {"sid": [[0, 1], [1]]},
        good | {"sid": [[0, 1], None]},
        good | {"sid": [[], []]},
        {"item_id": [], "name": [], "count": [], "sid": []},
        good | {"sid": ["<s_a_0>", "<s_a_1>"]},
        good | {"sid": [[0, 1], [None, 1]]},
    ]
    for table in tables:
        if table is not None:
            pl.DataFrame(table).write_parquet(path)
        with pytest.raises(CatalogError) as caught:
            Catalog.load(path)
        assert caught.value.code == "catalog_unreadable"
    pl.DataFrame(good).write_parquet(path)
    assert Catalog.load(path).row_of_codes((1, 0)) == 1


def test_a_large_catalog_is_mapped_and_the_same(tmp_path, monkeypatch):
    path, mapped = tmp_path / "catalog.parquet", tmp_path / "catalog.trie"
    for seed in (3, 4):  # the second catalog takes the place of the first, whose mapped file is stale then
        catalog = random_catalog(seed)
        catalog.save(path)
        for _ in range(2):
            loaded = Catalog.load(path, mapped_from=50)
            assert mapped.is_file()
            assert list(loaded.item_ids) == list(catalog.item_ids)
            assert list(loaded.names) == list(catalog.names)
            np.testing.assert_array_equal(loaded.codes, catalog.codes)
            np.testing.assert_array_equal(loaded.counts, catalog.counts)
            for name in ("first_child", "code", "level_starts", "rows"):
                np.testing.assert_array_equal(getattr(loaded.trie, name), getattr(catalog.trie, name))
            assert loaded.rows([*catalog.item_ids, "unknown"]).tolist() == [*range(50), -1]
            assert [loaded.row_of_codes(sid) for sid in catalog.codes] == list(range(50))
            for name in ("laid", "long", "data", "offsets"):
                np.testing.assert_array_equal(getattr(loaded.cards, name), getattr(catalog.cards, name))
    monkeypatch.setattr(pl, "read_parquet", None)
    assert len(Catalog.load(path)) == 50, "a mapped catalog reads no Parquet"


def test_a_mapped_file_of_another_version_is_made_anew(tmp_path):
    """Its arrays have other names or meanings."""
    path, mapped = tmp_path / "catalog.parquet", tmp_path / "catalog.trie"
    catalog = random_catalog()
    catalog.save(path)
    Catalog.load(path, mapped_from=1)
    ours = mapped.read_bytes()
    mapped.write_bytes(b"PLYRMAP4" + ours[8:])
    assert Catalog.load(path, mapped_from=1).rows(list(catalog.item_ids)).tolist() == list(range(50))
    assert mapped.read_bytes() == ours


def test_a_small_catalog_leaves_no_file(tmp_path):
    random_catalog().save(tmp_path / "catalog.parquet")
    Catalog.load(tmp_path / "catalog.parquet", mapped_from=51)
    assert [path.name for path in tmp_path.iterdir()] == ["catalog.parquet"]


def test_a_folder_that_cannot_be_written_is_reported_and_read(tmp_path, monkeypatch, caplog):
    random_catalog().save(tmp_path / "catalog.parquet")

    def refuse(path, arrays, source):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("polyrec.sid.catalog.write_arrays", refuse)
    assert len(Catalog.load(tmp_path / "catalog.parquet", mapped_from=1)) == 50
    assert "[catalog_not_mapped]" in caplog.text


def test_the_fingerprint_is_of_layout_and_codebooks_only():
    first = Catalog.fingerprint((4, 4), "abc")
    assert first == Catalog.fingerprint(np.array([4, 4]), "abc")
    assert len({first, Catalog.fingerprint((4, 5), "abc"), Catalog.fingerprint((4, 4), "abd")}) == 3


def test_importing_the_catalog_loads_no_torch():
    code = (
        "import sys, polyrec.sid.catalog, polyrec.sid.layout, polyrec.sid.trie, polyrec.sid.quantizer\n"
        "import polyrec.sid.vectors, polyrec.sid.report, polyrec.data.prepare\n"
        "assert not {'torch', 'matplotlib', 'faiss', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
