"""Model folders that are incomplete, or whose parts do not fit together, are refused before anything is served."""

from __future__ import annotations

import json
import shutil

import numpy as np
import polars as pl
import pytest
from tokenizers import Tokenizer

from polyrec.core.errors import PolyrecError
from polyrec.data.prompt import PromptConfig
from polyrec.engine.folder import read_folder
from polyrec.engine.recommender import Recommender
from polyrec.sid.catalog import Catalog
from polyrec.sid.tokenizer import build_tokenizer, save_tokenizer
from polyrec.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("folder") / "tiny", num_items=40, codebook_sizes=(8, 8, 8))


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def refusal(folder, **options):
    with pytest.raises(PolyrecError) as caught:
        Recommender.from_pretrained(folder, **options)
    assert caught.value.remedy
    return caught.value.code


def edit(path, change):
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_whole_folder_is_read(folder):
    contents = read_folder(folder)
    assert len(contents.catalog) == 40
    assert contents.layout.codebook_sizes == (8, 8, 8)
    assert contents.prompt == PromptConfig()
    assert contents.kind == "basket"
    assert contents.fingerprint == Catalog.fingerprint((8, 8, 8), "random")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "config_json_missing"),
        ("model.safetensors", "weights_missing"),
        ("catalog.parquet", "catalog_missing"),
        ("tokenizer.json", "tokenizer_missing"),
    ],
)
def test_a_missing_file(folder, name, code):
    (folder / name).unlink()
    assert refusal(folder) == code


def test_no_folder(tmp_path):
    assert refusal(tmp_path / "nothing") == "model_folder_missing"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "json_invalid"),
        ("polyrec.json", "json_invalid"),
        ("catalog.parquet", "catalog_unreadable"),
        ("tokenizer.json", "tokenizer_invalid"),
        ("model.safetensors", "weights_unreadable"),
    ],
)
def test_a_damaged_file(folder, name, code):
    (folder / name).write_bytes((folder / name).read_bytes()[:50])
    assert refusal(folder) == code


@pytest.mark.parametrize("key", ["format_version", "sid_layout", "prompt", "kind", "catalog_fingerprint"])
def test_polyrec_json_without_a_key(folder, key):
    edit(folder / "polyrec.json", lambda facts: facts.pop(key))
    assert refusal(folder) == ("format_version" if key == "format_version" else "facts_incomplete")


def test_another_format_version(folder):
    edit(folder / "polyrec.json", lambda facts: facts.update(format_version=99))
    assert refusal(folder) == "format_version"


def test_another_tokenizer(folder):
    save_tokenizer(build_tokenizer((8, 8, 9)), folder)
    assert refusal(folder) == "layout_differs"


def test_a_tokenizer_without_sids(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = []
    tokenizer["model"]["vocab"] = {"a": 0}
    tokenizer["model"]["unk_token"] = "a"
    tokenizer["post_processor"] = None
    Tokenizer.from_str(json.dumps(tokenizer)).save(str(folder / "tokenizer.json"))
    assert refusal(folder) == "sid_tokens_missing"


def test_another_prompt(folder):
    edit(folder / "polyrec.json", lambda facts: facts["prompt"].update(digest="0" * 64))
    assert refusal(folder) == "prompt_differs"
    # a setting changed by hand no longer fits the digest
    shutil.rmtree(folder)
    write_tiny_model(folder, num_items=10)
    edit(folder / "polyrec.json", lambda facts: facts["prompt"]["config"].update(max_items=7))
    assert refusal(folder) == "prompt_differs"


def test_an_unknown_prompt_setting(folder):
    edit(folder / "polyrec.json", lambda facts: facts["prompt"]["config"].update(max_itemz=7))
    assert refusal(folder) == "config_invalid"


@pytest.mark.parametrize("codes", [[[0, 0, 8]], [[0, 0]], [[1, 2, 3, 4]], [[0, -1, 0]]])
def test_a_catalog_of_other_codebooks(folder, tmp_path, codes):
    other = tmp_path / "other.parquet"
    Catalog(["a"], np.array(codes), [None], np.ones(1)).save(other)
    assert refusal(folder, catalog=other) == "catalog_does_not_fit"


def test_an_empty_catalog(folder, tmp_path):
    other = tmp_path / "other.parquet"
    pl.read_parquet(folder / "catalog.parquet").clear().write_parquet(other)
    assert refusal(folder, catalog=other) == "catalog_unreadable"


def test_another_catalog_of_the_same_codebooks_is_served(folder, tmp_path):
    other = tmp_path / "other.parquet"
    Catalog(["x", "y"], np.array([[0, 1, 2], [7, 7, 7]]), ["X", None], np.ones(2)).save(other)
    answer = Recommender.from_pretrained(folder, catalog=other).recommend(["x"], n=5)
    assert sorted(answer.item_ids) == ["x", "y"]


@pytest.mark.parametrize(("name", "key"), [("prepare.json", "fingerprint"), ("polyrec.json", "catalog_fingerprint")])
def test_a_catalog_of_the_same_sizes_but_other_codebooks(folder, tmp_path, name, key):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert read_folder(folder, other / "catalog.parquet").path == folder
    (other / name).write_text(json.dumps({key: Catalog.fingerprint((8, 8, 8), "others")}), encoding="utf-8")
    assert refusal(folder, catalog=other / "catalog.parquet") == "catalog_does_not_fit"


def test_weights_of_another_shape(folder):
    edit(folder / "config.json", lambda config: config.update(intermediate_size=48))
    assert refusal(folder) == "weight_shape"


def test_a_vocabulary_smaller_than_the_layout(folder):
    """Token ids of the layout would index past the embedding."""
    edit(folder / "config.json", lambda config: config.update(vocab_size=16))
    assert refusal(folder) == "weight_shape"


def test_a_foreign_folder_needs_no_polyrec_json(folder):
    (folder / "polyrec.json").unlink()
    contents = read_folder(folder)
    assert contents.fingerprint is None
    assert contents.kind == "sequence"
    assert len(Recommender.from_pretrained(folder).recommend(["item-1"], n=3).items) == 3
