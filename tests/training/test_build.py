"""Where a run starts: codes at their centroids, named sizes, and a Hugging Face checkpoint with SID rows added."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from small_shop import SIZES as SHOP_SIZES
from small_shop import prepare_shop, read_log
from tokenizers import Tokenizer, models, pre_tokenizers

from polyrec.core.errors import CheckpointError
from polyrec.core.files import read_json, write_json
from polyrec.models.checkpoint import load_model
from polyrec.sid.layout import SidLayout
from polyrec.sid.tokenizer import load_tokenizer, num_tokens
from polyrec.training import run
from polyrec.training.build import centroid_embeddings, start_model
from polyrec.training.prepared import read_prepared
from polyrec.training.recipe import SIZES, TrainConfig

WORDS = ["<unk>", "<|end|>", *(f"word{n}" for n in range(40))]
SOURCE_ROWS = 48  # more than the tokenizer has tokens, as in many published checkpoints


@pytest.mark.parametrize(("dim", "hidden"), [(6, 16), (16, 16)])
def test_codes_start_in_the_directions_of_their_centroids(dim, hidden):
    rng = np.random.default_rng(dim)
    layout = SidLayout.contiguous((7, 9), 3)
    centroids = tuple(rng.standard_normal((size, dim)).astype(np.float32) * scale for size, scale in ((7, 5), (9, 0.1)))
    weight = torch.zeros(layout.end + 4, hidden)
    centroid_embeddings(weight, layout, SimpleNamespace(centroids=centroids), spread=0.02)
    for start, level in zip(layout.level_starts, centroids, strict=True):
        rows = weight[start : start + len(level)].double().numpy()
        cosine = [x @ x.T / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x, axis=1)) for x in (rows, level)]
        np.testing.assert_allclose(cosine[0], cosine[1], atol=1e-5)
        assert np.sqrt(np.square(rows).mean()) == pytest.approx(0.02, rel=1e-4)
    untouched = torch.cat([weight[:3], weight[layout.begin :]])
    assert untouched.abs().max() == 0
    again = torch.zeros_like(weight)
    centroid_embeddings(again, layout, SimpleNamespace(centroids=centroids), spread=0.02)
    torch.testing.assert_close(again, weight, rtol=0, atol=0)


def test_equal_directions_of_two_levels_are_placed_equal():
    """One rotation serves all levels: a code of level 2 that points where one of level 1 does starts beside it."""
    centroids = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    layout = SidLayout.contiguous((5, 5), 0)
    weight = torch.zeros(layout.end + 1, 8)  # fewer hidden units than dimensions
    centroid_embeddings(weight, layout, SimpleNamespace(centroids=(centroids, 3 * centroids)), spread=0.5)
    torch.testing.assert_close(weight[:5], weight[5:10])


def test_centroids_reach_the_model(data, recipe, backend):
    for on in (True, False):
        config = recipe(centroid_init=on, initializer_range=0.05)
        model, _ = start_model(config, num_tokens(data.tokenizer), data.layout, data.codebooks, 64, backend)
        start, size = data.layout.level_starts[0], data.layout.codebook_sizes[0]
        expected = torch.zeros(model.config.vocab_size, model.config.hidden_size)
        centroid_embeddings(expected, data.layout, data.codebooks, 0.05)
        same = torch.equal(model.embed_tokens.weight[start : start + size].detach(), expected[start : start + size])
        assert same == on


def test_named_sizes_and_seeds(data, backend):
    def parameters(**settings):
        config = TrainConfig(**settings)
        return start_model(config, num_tokens(data.tokenizer), data.layout, data.codebooks, 64, backend)[0]

    model = parameters(size="tiny")
    assert model.config.hidden_size == SIZES["tiny"]["hidden_size"]
    assert model.config.vocab_size % 256 == 0
    assert model.training
    torch.testing.assert_close(parameters(seed=3).norm.weight, parameters(seed=3).norm.weight)
    name = "layers.0.mlp.down_proj.weight"
    same, other = (dict(parameters(seed=seed).named_parameters())[name] for seed in (0, 1))
    torch.testing.assert_close(dict(model.named_parameters())[name], same, rtol=0, atol=0)
    assert not torch.equal(same, other)


def test_prompts_longer_than_the_positions_are_refused(data, recipe, backend):
    with pytest.raises(CheckpointError) as error:
        run.plan(data, recipe(prompt={"max_items": 200}), backend)
    assert error.value.code == "positions_too_few"


def test_positions_that_a_config_file_leaves_out_are_its_model_s_default(data, recipe, backend, tmp_path):
    write_json(tmp_path / "config.json", {k: v for k, v in SHOP_SIZES.items() if k != "max_position_embeddings"})
    settings = {"model_config_file": str(tmp_path / "config.json")}
    model, _ = start_model(recipe(**settings), 100, data.layout, data.codebooks, 4096, backend)
    assert model.config.max_position_embeddings == 4096
    with pytest.raises(CheckpointError) as error:
        start_model(recipe(**settings), 100, data.layout, data.codebooks, 4097, backend)
    assert error.value.code == "positions_too_few"


@pytest.mark.parametrize("said", [None, False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_the_recipe_ties_the_head_where_the_config_file_does_not_say(data, recipe, backend, tmp_path, said, asked):
    write_json(tmp_path / "config.json", SHOP_SIZES | ({} if said is None else {"tie_word_embeddings": said}))
    config = recipe(model_config_file=str(tmp_path / "config.json"), tie_word_embeddings=asked)
    model, _ = start_model(config, num_tokens(data.tokenizer), data.layout, data.codebooks, 64, backend)
    assert model.config.tie_word_embeddings == (asked if said is None else said)


@pytest.mark.parametrize("content", [None, "[1]"])
def test_a_config_file_that_is_none_is_refused(data, recipe, backend, tmp_path, content):
    path = tmp_path / "config.json"
    if content:
        path.write_text(content)
    with pytest.raises(CheckpointError) as error:
        run.plan(data, recipe(model_config_file=str(path)), backend)
    assert error.value.code == "model_config_missing"
    assert str(path) in error.value.message


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small random Qwen3 of transformers with a word tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=SOURCE_ROWS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def extended(source, tmp_path_factory):
    return read_prepared(prepare_shop(tmp_path_factory.mktemp("extended"), tokenizer=str(source)))


def test_a_checkpoint_of_transformers_is_extended_and_trained(source, extended, backend, tmp_path):
    config = TrainConfig(init_from=str(source), steps=4, eval_every=0, prompt={"max_items": 8})
    assert extended.layout.level_starts[0] == len(WORDS), "the new tokens follow the old ones"
    out = run.train(extended, tmp_path / "out", config, backend)

    old = transformers.AutoModelForCausalLM.from_pretrained(source)
    new, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert new.config.vocab_size == 256
    assert new.config.tie_word_embeddings
    before, after = (model.get_input_embeddings().weight.detach() for model in (old, new))
    moved = (after[: len(WORDS)] - before[: len(WORDS)]).abs().max()
    assert 0 < moved < 0.02, "a few warm-up steps away from where it came from"
    losses = [line["loss"] for line in read_log(out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words("word3 <s_a_1> <|sid_begin|>")["input_ids"] == [5, len(WORDS) + 1, extended.layout.begin]
    assert words.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert num_tokens(load_tokenizer(out)) == extended.layout.end + 1
    load_model(out, backend)


def test_a_tokenizer_that_was_not_extended_is_refused(source, data, extended, backend, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(source, larger)
    shutil.copyfile(extended.path / "tokenizer.json", larger / "tokenizer.json")
    with pytest.raises(CheckpointError) as error:
        run.plan(extended, TrainConfig(init_from=str(larger)), backend)
    assert error.value.code == "tokenizer_not_extended"
    assert "--tokenizer" in error.value.remedy


@pytest.mark.parametrize("sizes", [(4, 4, 4), (64, 64, 64)])
def test_a_new_tokenizer_is_no_extended_one_however_large(source, backend, tmp_path, sizes):
    prepared = read_prepared(prepare_shop(tmp_path, codebook_sizes=sizes))
    assert (num_tokens(prepared.tokenizer) > len(WORDS)) == (sizes[0] > 4)
    with pytest.raises(CheckpointError) as error:
        run.plan(prepared, TrainConfig(init_from=str(source), prompt={"max_items": 8}), backend)
    assert error.value.code == "tokenizer_not_extended"


def test_a_checkpoint_with_too_few_positions_is_refused(source, extended, backend, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(source, short)
    write_json(short / "config.json", {**read_json(short / "config.json"), "max_position_embeddings": 16})
    with pytest.raises(CheckpointError) as error:
        run.plan(extended, TrainConfig(init_from=str(short)), backend)
    assert error.value.code == "positions_too_few"
