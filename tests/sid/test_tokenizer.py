"""The SID tokenizers, checked through transformers and through the layout they must have."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from polyrec.core.errors import CatalogError, CheckpointError
from polyrec.core.vocabulary import padded_vocab_size
from polyrec.sid.layout import BEGIN, END, SidLayout
from polyrec.sid.tokenizer import (
    build_tokenizer,
    extend_tokenizer,
    layout_of,
    load_tokenizer,
    num_tokens,
    save_tokenizer,
    sid_tokens,
)

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(params=["config", "file", "qwen"])
def base_folder(request, tmp_path):
    """A byte-level BPE folder, its chat template in the config or in a file of its own; or one of Qwen's own class."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the user bought these items and then bought"] * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "base"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if request.param == "config":
        config["chat_template"] = TEMPLATE
        decoder = tokenizer.get_added_tokens_decoder().items()
        config["added_tokens_decoder"] = {str(k): {"content": v.content, "special": True} for k, v in decoder}
    else:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if request.param == "qwen":
        config["tokenizer_class"] = "Qwen2Tokenizer"
        tokenizer.model.save(str(folder))  # vocab.json and merges.txt, which know nothing of added tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("sizes", [(1,), (3, 5), (7, 2, 300), (2, 2, 2, 2, 2)])
def test_new_tokenizer_has_the_contiguous_layout(sizes):
    tokenizer = build_tokenizer(sizes)
    assert layout_of(tokenizer) == SidLayout.contiguous(sizes, first_token=2)
    assert num_tokens(tokenizer) == tokenizer.get_vocab_size() == 4 + sum(sizes)
    assert [tokenizer.id_to_token(2 + i) for i in range(sum(sizes) + 2)] == sid_tokens(sizes)
    assert tokenizer.token_to_id("<|endoftext|>") == 0


def test_specials_stand_between_unk_and_the_codes():
    tokenizer = build_tokenizer((2, 2), specials=["<|basket|>"])
    assert tokenizer.token_to_id("<|basket|>") == 2
    assert layout_of(tokenizer).level_starts == (3, 5)
    assert tokenizer.encode("<s_a_1><|basket|><s_b_0>").ids == [4, 2, 5]


@pytest.mark.parametrize("gap", ["", " ", "  \n"])
def test_every_sid_tokenizes_with_and_without_spaces(gap):
    sizes = (4, 6, 11)
    tokenizer, layout = build_tokenizer(sizes), SidLayout.contiguous(sizes, 2)
    rng = np.random.default_rng(0)
    for codes in rng.integers(0, sizes, size=(50, 3)):
        expected = [layout.begin, *layout.tokens(codes).tolist(), layout.end]
        text = layout.text(codes)
        spaced = gap.join([BEGIN, *text.replace("><", "> <").split(" "), END])
        assert tokenizer.encode(spaced).ids == expected
        assert tokenizer.decode(expected) == BEGIN + text + END  # also with special tokens skipped, the default


def test_words_and_codes_out_of_range_are_unknown():
    tokenizer = build_tokenizer((2, 2))
    assert tokenizer.encode("hello <s_a_1> world").ids == [1, 3, 1]
    assert tokenizer.encode("<s_a_2>").ids == [1]
    assert tokenizer.encode("<s_a_01>").ids == [1]


def test_transformers_loads_a_new_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = build_tokenizer((5, 5, 5))
    save_tokenizer(tokenizer, tmp_path / "t")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    text = "<|sid_begin|><s_a_1><s_b_2><s_c_3><|sid_end|>"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(tokenizer.encode(text).ids) == text
    assert loaded.pad_token_id == 0
    assert len(loaded) == num_tokens(tokenizer)
    assert layout_of(load_tokenizer(tmp_path / "t")) == layout_of(tokenizer)


def test_extended_tokenizer_keeps_ids_template_and_config(base_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = (3, 4)
    base = load_tokenizer(base_folder)
    extended = extend_tokenizer(base_folder, sizes)
    assert layout_of(extended) == SidLayout.contiguous(sizes, num_tokens(base))
    save_tokenizer(extended, tmp_path / "out", source_folder=base_folder)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    old = transformers.AutoTokenizer.from_pretrained(base_folder)
    words = "the user bought <|im_end|> these"
    assert loaded(words)["input_ids"] == old(words)["input_ids"] == base.encode(words).ids
    sid = "<|sid_begin|><s_a_2><s_b_3><|sid_end|>"
    ids = loaded(f"bought {sid} then")["input_ids"]
    layout = layout_of(extended)
    assert [token for token in ids if token >= num_tokens(base)] == [
        layout.begin, layout.level_starts[0] + 2, layout.level_starts[1] + 3, layout.end,
    ]  # fmt: skip
    assert loaded.decode(ids, skip_special_tokens=True) == f"bought {sid} then"
    messages = [{"role": "user", "content": "bought"}]
    rendered = loaded.apply_chat_template(messages, tokenize=False)
    assert rendered == old.apply_chat_template(messages, tokenize=False) == "<|im_start|>bought<|im_end|>"
    assert loaded.eos_token == "<|im_end|>"
    assert len(loaded) == num_tokens(extended)


def test_extending_twice_is_refused(base_folder, tmp_path):
    save_tokenizer(extend_tokenizer(base_folder, (2, 2)), tmp_path / "out", source_folder=base_folder)
    with pytest.raises(CatalogError) as caught:
        extend_tokenizer(tmp_path / "out", (2, 2))
    assert caught.value.code == "sid_tokens_present"


@pytest.mark.parametrize("content", [None, b"not json", b"\xff\xfe{", b'{"model": {}}'])
def test_a_folder_without_a_readable_tokenizer(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code == ("tokenizer_missing" if content is None else "tokenizer_invalid")


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0), (2,) * 27])
def test_impossible_codebook_sizes(sizes):
    with pytest.raises(CatalogError) as caught:
        build_tokenizer(sizes)
    assert caught.value.code == "codebook_sizes_invalid"


def test_repeated_special_token_is_refused():
    with pytest.raises(CatalogError) as caught:
        build_tokenizer((2,), specials=["<s_a_0>"])
    assert caught.value.code == "special_tokens_repeated"


def test_padded_vocab_size():
    assert [padded_vocab_size(n) for n in (1, 255, 256, 257, 151_669)] == [256, 256, 256, 512, 151_808]


def test_words_are_plain_tokens_before_the_sids():
    tokenizer = build_tokenizer((2, 2), specials=["<|basket|>"], words=["w3", "w4"])
    assert tokenizer.encode("w4 <s_a_1>w3 other").ids == [4, 6, 3, 1]
    assert tokenizer.decode([3, 2], skip_special_tokens=True) == "w3"
    with pytest.raises(CatalogError):
        build_tokenizer((2, 2), words=["<s_a_0>"])
