"""Extended checkpoints, loaded by transformers and compared with what they were made from."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyrec.core.errors import CheckpointError
from polyrec.models.extend import EMBEDDING, HEAD, INDEX, SINGLE, extend_checkpoint, extended_rows

transformers = pytest.importorskip("transformers")

ROWS, HIDDEN = 300, 32


def make_checkpoint(folder, tied, dtype=torch.float32, shard_size="1GB"):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=ROWS,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"another format's weights, which would contradict the new ones")
    return model


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    make_checkpoint(folder, tied=True)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_old_logits_do_not_change(tmp_path, tied, shard_size, dtype):
    source, out = tmp_path / "source", tmp_path / "out"
    old = make_checkpoint(source, tied, dtype, shard_size)
    assert extend_checkpoint(source, out, num_tokens=700) == out
    new = load(out)
    assert new.config.vocab_size == 768
    assert new.dtype == dtype
    assert new.config.tie_word_embeddings == tied
    assert (new.lm_head.weight is new.model.embed_tokens.weight) == tied
    assert new.lm_head.weight.shape == new.model.embed_tokens.weight.shape == (768, HIDDEN)
    tokens = torch.randint(0, ROWS, (3, 17))
    with torch.no_grad():
        # bfloat16 matmuls of another width may round differently; the weights themselves are compared below.
        torch.testing.assert_close(
            new(tokens).logits[..., :ROWS], old(tokens).logits, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-3
        )
    for name, tensor in old.state_dict().items():
        assert torch.equal(new.state_dict()[name][: len(tensor)], tensor), name


def test_new_rows_lie_near_the_mean_and_differ():
    old = torch.randn(200, 16, generator=torch.Generator().manual_seed(3)) * 2 + 5
    rows = extended_rows(old, 512, 200, 400, None, seed=0)
    fresh = rows[200:]
    assert torch.equal(rows[:200], old)
    torch.testing.assert_close(fresh.mean(0), old.mean(0), atol=0.1, rtol=0)
    assert 0.05 < float((fresh.std(0) / old.std(0)).mean()) < 0.2
    assert len(torch.unique(fresh, dim=0)) == len(fresh)
    assert torch.equal(rows, extended_rows(old, 512, 200, 400, None, seed=0))
    assert not torch.equal(rows, extended_rows(old, 512, 200, 400, None, seed=1))


@pytest.mark.parametrize("tied", [True, False])
def test_given_vectors_are_the_last_tokens(tmp_path, tied):
    source, out = tmp_path / "source", tmp_path / "out"
    old = make_checkpoint(source, tied)
    init = torch.randn(100, HIDDEN)
    extend_checkpoint(source, out, num_tokens=410, init=init)
    new = load(out)
    embedding = new.model.embed_tokens.weight
    assert torch.equal(embedding[310:410], init)
    assert torch.equal(embedding[:ROWS], old.model.embed_tokens.weight)
    assert torch.equal(new.lm_head.weight[310:410], init) == tied


def test_spare_rows_of_the_checkpoint_are_made_anew(tied_folder, tmp_path):
    old = load(tied_folder).model.embed_tokens.weight
    extend_checkpoint(tied_folder, tmp_path / "out", num_tokens=290, init=torch.ones(10, HIDDEN), first_new=280)
    new = load(tmp_path / "out").model.embed_tokens.weight
    assert new.shape[0] == 512  # 300 rows were no multiple of 256
    assert torch.equal(new[:280], old[:280])
    assert torch.equal(new[280:290], torch.ones(10, HIDDEN))
    assert not torch.equal(new[290:ROWS], old[290:])


def test_a_tied_head_that_is_stored_stays_equal(tied_folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tied_folder, source)
    tensors = load_file(source / SINGLE)
    save_file(tensors | {HEAD: tensors[f"model.{EMBEDDING}"].clone()}, source / SINGLE, {"format": "pt"})
    extend_checkpoint(source, tmp_path / "out", num_tokens=400, init=torch.randn(5, HIDDEN))
    tensors = load_file(tmp_path / "out" / SINGLE)
    assert torch.equal(tensors[HEAD], tensors[f"model.{EMBEDDING}"])


def test_other_files_come_along_and_other_weights_do_not(tied_folder, tmp_path):
    extend_checkpoint(tied_folder, tmp_path / "out", num_tokens=400)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "chat_template.jinja", SINGLE}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tied_folder, tmp_path / "out"))
    assert after == before | {"vocab_size": 512}


def test_the_index_of_a_sharded_checkpoint_counts_the_new_rows(tmp_path):
    make_checkpoint(tmp_path / "source", tied=False, shard_size="20KB")
    extend_checkpoint(tmp_path / "source", tmp_path / "out", num_tokens=400)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    sizes = [load_file(tmp_path / "out" / name)[key] for key, name in index["weight_map"].items()]
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in sizes)
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in sizes)


def broken(source, fault):
    if fault == "no config":
        (source / "config.json").unlink()
    elif fault == "no weights":
        (source / SINGLE).unlink()
    elif fault == "torn weights":
        (source / SINGLE).write_bytes((source / SINGLE).read_bytes()[:1000])
    elif fault == "other vocabulary":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"vocab_size": 299}))
    elif fault == "no embedding":
        save_file({"x": torch.zeros(2)}, source / SINGLE)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("no config", "config_incomplete"),
        ("no weights", "weights_missing"),
        ("torn weights", "weights_unreadable"),
        ("other vocabulary", "checkpoint_mismatch"),
        ("no embedding", "embedding_not_found"),
    ],
)
def test_a_faulty_source_leaves_nothing_behind(tied_folder, tmp_path, fault, code):
    source = tmp_path / "source"
    shutil.copytree(tied_folder, source)
    broken(source, fault)
    with pytest.raises(CheckpointError) as caught:
        extend_checkpoint(source, tmp_path / "out", num_tokens=400)
    assert caught.value.code == code
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("num_tokens", "init_rows", "first_new"), [(299, 0, None), (310, 11, None), (400, 0, 301), (400, 0, 0)]
)
def test_a_request_that_does_not_fit(tied_folder, tmp_path, num_tokens, init_rows, first_new):
    with pytest.raises(CheckpointError) as caught:
        extend_checkpoint(
            tied_folder, tmp_path / "out", num_tokens, torch.zeros(init_rows, HIDDEN), first_new=first_new
        )
    assert caught.value.code == "extension_invalid"


def test_an_output_in_use_is_refused(tied_folder, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        extend_checkpoint(tied_folder, tmp_path, num_tokens=400)
    assert caught.value.code == "output_exists"
    assert (tmp_path / "kept.txt").read_text() == "mine"
