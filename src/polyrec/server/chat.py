"""Chat messages to prompt tokens: the folder's chat template if it has one, its tokenizer, then `<|sid_begin|>`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import CheckpointError, RequestError
from ..core.files import read_json
from ..sid.layout import SidLayout

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Render = Callable[[Sequence[dict[str, str]]], str]
_NAMED = 5  # unknown pieces of text that an error names


@dataclass(frozen=True)
class ChatPrompt:
    """tokenizer: the folder's. layout: where its SID tokens stand. render: messages -> text by the chat template."""

    tokenizer: Tokenizer
    layout: SidLayout
    render: Render | None = None

    def text(self, messages: Sequence[dict[str, str]]) -> str:
        """Messages (role, content) -> prompt text: the template's, or without one the last user message alone."""
        if self.render is not None:
            return self.render(messages)
        for message in reversed(messages):
            if message["role"] == "user":
                return message["content"]
        raise RequestError(
            "user_message_missing", "No message has the role 'user'.", "Add one with the history's SIDs."
        )

    def token_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages -> prompt token ids that end with `<|sid_begin|>`; text the tokenizer does not know is refused."""
        text = self.text(messages)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if unknown := self._unknown_text(text, encoding):
            named = ", ".join(repr(piece[:40]) for piece in unknown[:_NAMED])
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            raise RequestError(
                "unknown_tokens",
                f"The tokenizer does not know this text: {named}{more}.",
                "Send the history as SID tokens, for example <s_a_1><s_b_2><s_c_3>.",
            )
        if not encoding.ids:
            raise RequestError("prompt_empty", "The prompt has no tokens.", "Send the history's SIDs as text.")
        begin = self.layout.begin
        return encoding.ids if encoding.ids[-1] == begin else [*encoding.ids, begin]

    def _unknown_text(self, text: str, encoding: Encoding) -> list[str]:
        """What in `text` became the unknown token, or no token at all (spaces aside)."""
        unknown_token = getattr(self.tokenizer.model, "unk_token", None)
        unknown_id = self.tokenizer.token_to_id(unknown_token) if unknown_token is not None else None
        places = zip(encoding.ids, encoding.offsets, strict=True)
        pieces = [text[start:end] for token, (start, end) in places if token == unknown_id]
        if _is_covered(text, encoding):
            return pieces
        # A tokenizer without an unknown token drops what it does not know, and the places of what follows slip; which
        # word was at fault shows by asking for each alone.
        words = dict.fromkeys(text.split())
        return pieces + [
            word for word in words if not _is_covered(word, self.tokenizer.encode(word, add_special_tokens=False))
        ]


def _is_covered(text: str, encoding: Encoding) -> bool:
    """Whether each character but spaces belongs to a token."""
    covered = 0
    for start, end in encoding.offsets:
        if text[covered:start].strip():
            return False
        covered = max(covered, end)
    return not text[covered:].strip()


def load_template(folder: Path) -> Render | None:
    """The folder's chat template (chat_template.jinja, or a key of tokenizer_config.json); None without one."""
    config_path = folder / "tokenizer_config.json"
    config: dict[str, Any] = read_json(config_path) if config_path.is_file() else {}
    template = config.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, list):  # several named templates: the one called default
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return None if template is None else compile_template(template, config)


def compile_template(template: str, config: dict[str, Any]) -> Render:
    """Jinja source in Hugging Face's dialect -> a renderer. Sandboxed: a template is data, not trusted code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # What transformers gives to templates, beside Jinja's own; its tojson does not escape HTML.
    environment.globals["raise_exception"] = _raise_from_template
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise CheckpointError("chat_template_invalid", f"The chat template is not valid: {error}.") from error
    names = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    specials = {key: text for key, text in names.items() if text is not None}

    def render(messages: Sequence[dict[str, str]]) -> str:
        try:
            return compiled.render(messages=list(messages), add_generation_prompt=True, **specials)
        except jinja2.TemplateError as error:
            raise RequestError(
                "chat_template_refused",
                f"The model's chat template refuses these messages: {error}.",
                "Check the order of roles; one user message always fits.",
            ) from error

    return render


def _raise_from_template(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_text(token: object) -> str | None:
    """A special token as tokenizer_config.json writes it: text, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
