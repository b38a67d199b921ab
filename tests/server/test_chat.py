"""Messages to tokens: templates as transformers renders them, and text that a tokenizer does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polyrec.core.errors import CheckpointError, RequestError
from polyrec.core.files import write_json
from polyrec.server.chat import ChatPrompt, compile_template, load_template
from polyrec.sid.tokenizer import build_tokenizer, layout_of, sid_tokens

TEMPLATE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last %}{% continue %}{% endif %}
        {{- '<|im_start|>assistant\\n' + message.content | trim + eos_token + '\\n' }}
    {%- endif %}
    {% if tools %}never{% endif %}
{%- endfor %}
{{ messages | tojson }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHATS = [
    [{"role": "user", "content": "<s_a_1><s_b_1> & é"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": " a "}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": " a "}, {"role": "user", "content": "v"}],
]


@pytest.mark.parametrize("messages", CHATS)
def test_templates_render_as_in_transformers(messages: list[dict[str, str]]) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer((4, 4)), eos_token="<|endoftext|>")
    reference.chat_template = TEMPLATE
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert compile_template(TEMPLATE, {"eos_token": {"content": "<|endoftext|>"}})(messages) == expected


def test_templates_of_a_folder(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config {{ bos_token }}", "bos_token": "B"})
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "named"}]
    render = load_template(tmp_path)
    assert render is not None
    assert render([]) == "config B"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    render = load_template(tmp_path)
    assert render is not None
    assert render([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    render = load_template(tmp_path)
    assert render is not None
    assert render([]) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError):
        load_template(tmp_path)


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ undefined_thing.x }}"])
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(RequestError) as refused:
        compile_template(source, {})([{"role": "user", "content": "x"}])
    assert refused.value.code == "chat_template_refused"


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["recommend the next item to the user"] * 9, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in sid_tokens((4, 4))])
    return tokenizer


def letters_tokenizer() -> Tokenizer:
    """Letters a to e and no unknown token: other letters vanish without a trace."""
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate("abcde")}, []))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in sid_tokens((4, 4))])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text", "unknown"),
    [
        (byte_level_tokenizer(), "what else, 🦊?\n <s_a_1><s_b_3> é", []),
        (letters_tokenizer(), "abc <s_a_1> e", []),
        (letters_tokenizer(), "abxyc<s_a_1>q <s_b_9>", ["abxyc<s_a_1>q", "<s_b_9>"]),
        (build_tokenizer((4, 4)), " <s_a_1>\n<s_b_3> ", []),
        (build_tokenizer((4, 4)), "please<s_a_1>go <s_b_4>", ["please", "go", "<s_b_4>"]),
    ],
)
def test_unknown_text_is_named(tokenizer: Tokenizer, text: str, unknown: list[str]) -> None:
    layout = layout_of(tokenizer)
    prompt = ChatPrompt(tokenizer, layout)
    messages = [{"role": "user", "content": text}]
    if not unknown:
        ids = prompt.token_ids(messages)
        assert ids == [*tokenizer.encode(text, add_special_tokens=False).ids, layout.begin]
        return
    with pytest.raises(RequestError) as refused:
        prompt.token_ids(messages)
    assert refused.value.code == "unknown_tokens"
    assert refused.value.message == f"The tokenizer does not know this text: {', '.join(map(repr, unknown))}."


def test_begin_is_not_doubled() -> None:
    tokenizer = build_tokenizer((4, 4))
    prompt = ChatPrompt(tokenizer, layout_of(tokenizer))
    with_begin = prompt.token_ids([{"role": "user", "content": "<s_a_1><s_b_3><|sid_begin|>"}])
    assert with_begin == prompt.token_ids([{"role": "user", "content": "<s_a_1><s_b_3>"}])
    assert with_begin.count(layout_of(tokenizer).begin) == 1
