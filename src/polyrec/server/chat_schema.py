"""The wire shapes of /v1/chat/completions: the part of OpenAI's protocol that beam search over a catalog can honour."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from ..core.errors import RequestError
from ..core.request import Recommendation
from ..sid.layout import BEGIN, END
from .schema import Body, Milliseconds, checked_width

MAX_MESSAGES = 256


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    n: int = 1
    beam_width: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    stream: bool = False
    timeout_ms: Milliseconds | None = None

    def check(self, max_beam_width: int, model_name: str, depth: int) -> None:
        """Refuses what beam search over a catalog cannot honour."""
        checked_width(self.n, self.beam_width, max_beam_width)
        if self.temperature not in (None, 0):
            raise RequestError(
                "sampling_unsupported",
                f"temperature {self.temperature}: answers come from exact beam search, not from sampling.",
                "Send temperature 0 or leave it out; ask for more choices with n.",
            )
        if self.stream:
            raise RequestError(
                "stream_unsupported", "An answer comes as a whole.", "Send stream false or leave it out."
            )
        if self.model is not None and self.model != model_name:
            raise RequestError(
                "model_not_found",
                f"Model '{self.model}' is not served here.",
                f"Use '{model_name}' or leave 'model' out.",
                status=404,
            )
        for key in ("max_tokens", "max_completion_tokens"):
            if (limit := getattr(self, key)) is not None and limit < depth:
                raise RequestError(
                    "max_tokens_too_small",
                    f"{key} {limit} is less than the {depth} codes of an item.",
                    f"Send {depth + 2} or more (codes, begin and end), or leave it out.",
                )


class ChatMessage(BaseModel):
    """What a choice says: one SID between begin and end."""

    role: str = "assistant"
    content: str


class SglExt(BaseModel):
    """sequence_score: log-probability of the SID under the model's score rule."""

    sequence_score: float


class Choice(BaseModel):
    """One beam; index 0 is the best."""

    index: int
    message: ChatMessage
    finish_reason: str = "stop"
    sglext: SglExt


class Usage(BaseModel):
    """Tokens of the prompt (begin included) and of all choices as they are written (begin and end included)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(BaseModel):
    """The answer of /v1/chat/completions, OpenAI's shape."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage

    @classmethod
    def of(cls, answer: Recommendation, *, request_id: str, model: str, num_prompt: int, depth: int) -> ChatAnswer:
        """The engine's answer for a prompt of `num_prompt` tokens and SIDs of `depth` codes."""
        choices = [
            Choice(
                index=index,
                message=ChatMessage(content=f"{BEGIN}{item.sid}{END}"),
                sglext=SglExt(sequence_score=item.score),
            )
            for index, item in enumerate(answer.items)
        ]
        num_completion = len(choices) * (depth + 2)
        usage = Usage(
            prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion
        )
        created = int(time.time())
        return cls(id=f"chatcmpl-{request_id}", created=created, model=model, choices=choices, usage=usage)
