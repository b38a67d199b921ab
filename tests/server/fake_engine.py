"""An engine thread with EngineLoop's API whose timing the tests control, and a server process around it.

Histories that start with a command: `hold` (+ a name) waits in the engine until some request says `release`; `release`,
`cancelled` (which requests the engine saw cancelled) and `deadline` (seconds left) are answered at once; `boom` fails
with a bug; `die` ends the thread. Items are `i0`, `i1`, …; any other is unknown.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from polyrec.core.errors import PolyrecError, RequestError
from polyrec.core.request import Recommendation, RecommendedItem, RecommendRequest
from polyrec.server import pool
from polyrec.server.chat import ChatPrompt, load_template
from polyrec.server.launch import run_server
from polyrec.server.settings import ServerSettings
from polyrec.server.state import ServerState, Service
from polyrec.sid.layout import SidLayout
from polyrec.sid.tokenizer import build_tokenizer, layout_of

SIZES = (4, 8, 64)
NUM_ITEMS = 2000


def codes_of(row: int) -> tuple[int, int, int]:
    """Row -> its codes: the row written in the mixed base of SIZES."""
    return row // 512, row // 64 % 8, row % 64


@dataclass(frozen=True)
class FakeFacts:
    """What only the loaded engine knows."""

    device: str


@dataclass(frozen=True)
class FakePrepared:
    """The request itself is what goes to the engine."""

    search: RecommendRequest


class FakeFront:
    """What the engine finds is the answer already."""

    def prepare(self, request: RecommendRequest) -> FakePrepared:
        if request.history[0] == "unknown_is_an_error":
            raise RequestError("unknown_items", "Unknown items: x.", "Use known ones.")
        return FakePrepared(request)

    def prepare_prompt(self, token_ids: list[int], n: int, beam_width: int | None = None) -> FakePrepared:
        return FakePrepared(RecommendRequest(history=[f"tokens:{token_ids}"], n=n, beam_width=beam_width))

    def finish(self, prepared: FakePrepared, found: Recommendation) -> Recommendation:
        return found

    def finish_as_cards(self, prepared: FakePrepared, found: Recommendation) -> Recommendation:
        return self.finish(prepared, found)

    def sample(self) -> tuple[list[str], int, Recommendation]:
        return ["i0", "i1"], 1, Recommendation((RecommendedItem("i2", -1.0, "<s_a_0>"),), "level")


class FakeLoop:
    """One thread, a bounded queue, futures that can be cancelled while they wait."""

    def __init__(self, layout: SidLayout, max_queue: int) -> None:
        self._layout = layout
        self._max_queue = max_queue
        self._waiting: queue.Queue[tuple[Future, RecommendRequest] | None] = queue.Queue()
        self._release = threading.Event()
        self.cancelled: list[str] = []
        self.stats = {"requests": 0, "cancelled": 0, "batches": 0, "prompt_tokens": 0, "busy_seconds": 0.0}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def depth(self) -> int:
        return self._waiting.qsize()

    def search(self, request: RecommendRequest, deadline: float | None = None) -> Future:
        future: Future = Future()
        first = request.history[0]
        if first == "release":
            self._release.set()
        if first in ("release", "cancelled"):
            future.set_result(Recommendation((), "level", "model", tuple(self.cancelled)))
            return future
        if first == "deadline":
            left = "none" if deadline is None else str(deadline - time.monotonic())
            future.set_result(Recommendation((), "level", "model", (left,)))
            return future
        if self.depth >= self._max_queue:
            raise RequestError("queue_full", "Too many requests wait.", "Retry later.", status=429)
        if first.startswith("tokens:"):
            self.stats["prompt_tokens"] += first.count(",") + 1
        self._waiting.put((future, request))
        return future

    def drain(self, timeout: float | None = None) -> None:
        self._waiting.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            future, request = entry
            first = request.history[0]
            if not future.set_running_or_notify_cancel():
                self.cancelled.append(str(request.history[-1]))
                self.stats["cancelled"] += 1
            elif first == "boom":
                future.set_exception(RuntimeError("a bug in the engine"))
            elif first == "die":
                raise SystemExit
            else:
                if first == "hold":
                    self._release.wait(30)
                    self._release.clear()
                future.set_result(self._answer(request))
            self.stats["requests"] += 1
            self.stats["batches"] += 1
            self.stats["busy_seconds"] += 0.001

    def _answer(self, request: RecommendRequest) -> Recommendation:
        rows = [row for row in range(NUM_ITEMS) if f"i{row}" not in request.exclude]
        if request.allow is not None:
            rows = [row for row in rows if f"i{row}" in request.allow]
        items = [
            RecommendedItem(f"i{row}", -float(rank), self._layout.text(codes_of(row)), f"Item {row}" if row else None)
            for rank, row in enumerate(rows[: request.n])
        ]
        flat = [one for entry in request.history for one in ([entry] if isinstance(entry, str) else entry)]
        unknown = tuple(one for one in flat if not one.startswith(("i", "hold", "tokens")))
        return Recommendation(tuple(items), "level", "model", unknown)


def load_fake(folder: Path, settings: ServerSettings, state: ServerState) -> Service:
    """What launch.run_server calls in the loading thread; a file `broken` or `slow` in the folder has its effect."""
    state.stage = "loading_model"
    if (folder / "broken").exists():
        raise PolyrecError("model_broken", "The model is broken.", "Mend it.")
    while (folder / "slow").exists():
        time.sleep(0.01)
    state.facts = FakeFacts('a "fake" device')
    front, layout, chat = load_parts(folder, state.facts)
    loop = FakeLoop(layout, settings.max_queue)
    loop.start()
    return Service(loop, front, layout, chat)


def load_parts(folder: Path, facts: FakeFacts) -> tuple[FakeFront, SidLayout, ChatPrompt]:
    """What an HTTP worker loads; a file `no_parts` or `parts_bug` in the folder has its effect there."""
    assert facts.device
    in_worker = multiprocessing.parent_process() is not None
    if in_worker and (folder / "no_parts").exists():
        raise PolyrecError("parts_broken", "The catalog is broken.", "Mend it.")
    if in_worker and (folder / "parts_bug").exists():
        raise RuntimeError("a bug in the parts")
    tokenizer = build_tokenizer(SIZES)
    layout = layout_of(tokenizer)
    return FakeFront(), layout, ChatPrompt(tokenizer, layout, load_template(folder))


if __name__ == "__main__":
    if (Path(sys.argv[1]) / "no_lines").exists():  # as where there is no epoll
        pool.HAS_LINES = False
    try:
        run_server(sys.argv[1], ServerSettings.model_validate_json(sys.argv[2]), load_fake, load_parts)
    except PolyrecError as error:
        sys.exit(f"{error.code}: {error}")
