"""What the server knows about its engine: the loading stage, then the loaded service, written by the loading thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..core.request import CardAnswer, Recommendation, RecommendRequest
from ..sid.layout import SidLayout

if TYPE_CHECKING:
    from ..engine.front import Prepared
    from ..engine.loop import Outside
    from ..engine.searches import SearchRequest, SearchResult
    from .chat import ChatPrompt
    from .profile import Profile
    from .remote import RemoteProfile

READY, DRAINING, ENGINE_STOPPED = "ready", "draining", "engine_stopped"


class Front(Protocol):
    """The part of engine.front.Front that the server uses."""

    def prepare(self, request: RecommendRequest) -> Prepared | Recommendation:
        """A request's search, or its answer where none is needed; RequestError."""

    def prepare_prompt(self, token_ids: Sequence[int], n: int, beam_width: int | None = None) -> Prepared:
        """The search of a prompt that ends with `<|sid_begin|>`; RequestError."""

    def finish(self, prepared: Prepared, found: SearchResult) -> Recommendation:
        """The answer."""

    def finish_as_cards(self, prepared: Prepared, found: SearchResult) -> CardAnswer | Recommendation:
        """The answer, for `schema.encode_answer`."""

    def sample(self) -> tuple[Sequence[str], int, SearchResult]:
        """A history of ids, an n, and what a search could find for them."""


class Loop(Protocol):
    """The part of engine.loop.EngineLoop that the server uses."""

    def search(
        self, search: SearchRequest, deadline: float | None = None
    ) -> Future[SearchResult] | asyncio.Future[SearchResult]:
        """Queues a search; RequestError `queue_full` (429) when too many wait. deadline: `time.monotonic` seconds."""

    def drain(self, timeout: float | None = None) -> object:
        """Finishes what is queued, then ends the thread."""

    @property
    def is_alive(self) -> bool:
        """Whether its thread still serves."""

    @property
    def depth(self) -> int:
        """Requests waiting."""

    @property
    def stats(self) -> Mapping[str, float]:
        """Counters: requests, cancelled, expired, batches, prompt_tokens, busy_seconds."""


def _nobody_to_tell(outside: Outside | None) -> None:
    pass


@dataclass(frozen=True)
class Service:
    """A loaded model, ready to answer. profile: None where no profiles may be taken. attend: tells the loop who brings it
    searches from outside the process (None: nobody any more)."""

    loop: Loop
    front: Front
    layout: SidLayout
    chat: ChatPrompt
    profile: Profile | RemoteProfile | None = None
    attend: Callable[[Outside | None], None] = _nobody_to_tell


@dataclass
class ServerState:
    """model_name: how the model is called on the wire. stage: what /ready tells. service: None until loaded.

    facts: engine.front.EngineFacts once the model is loaded, well before it is ready: HTTP workers need them to load.
    """

    model_name: str
    stage: str = "starting"
    facts: Any = None
    service: Service | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> bool:
        """Whether recommendation requests are answered."""
        return self.service is not None and self.stage == READY and not self.engine_stopped

    @property
    def engine_stopped(self) -> bool:
        """Whether a loaded engine's thread has ended, which only a mistake of ours can do while the server runs."""
        return self.service is not None and not self.service.loop.is_alive

    def serve(self, service: Service) -> None:
        """Opens the server for requests."""
        self.service = service
        self.stage = READY
