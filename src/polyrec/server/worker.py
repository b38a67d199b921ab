"""An HTTP worker: a process that reads, checks, tokenises and writes, and asks the engine's process for searches alone.

It loads no torch, and a large catalog is mapped, so all workers and the engine share its memory. SIGINT and SIGTERM are for the
engine's process, which tells its workers; a worker whose engine is gone ends by itself.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ..core.errors import PolyrecError
from ..sid.layout import SidLayout
from .app import create_app
from .awake import Awake
from .channel import Answers, Channel, Count, Counted, Drain, Facts, Failed, Loaded, Open, Status
from .chat import ChatPrompt, load_template
from .http import uvicorn_config
from .logs import configure_logs
from .metrics import ServerMetrics
from .rehearsal import Rehearsal
from .remote import RemoteLoop, RemoteProfile
from .settings import ServerSettings
from .state import READY, Front, ServerState, Service

Parts = tuple[Front, SidLayout, ChatPrompt]
LoadParts = Callable[[Path, Any], Parts]


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is told when it is started. created: when the server was; engine_pid: its process.

    load_parts: (folder, facts) -> what stands around the engine. stays_awake: whether it may keep a core busy while it waits
    for a lone request's answer.
    """

    folder: Path
    settings: ServerSettings
    created: int
    engine_pid: int
    load_parts: LoadParts
    stays_awake: bool = False


def load_parts(folder: Path, facts: Any) -> Parts:
    """Reads a model folder without its weights."""
    from ..engine.folder import read_folder
    from ..engine.front import Front as FolderFront

    contents = read_folder(folder)
    chat = ChatPrompt(contents.tokenizer, contents.layout, load_template(folder))
    front = FolderFront.of_folder(contents, facts)
    front.make_ready()
    return front, contents.layout, chat


def run_worker(end: socket.socket, listener: socket.socket, start: WorkerStart) -> None:
    """The whole life of a worker's process. end: its end of the channel."""
    configure_logs(start.settings.log_level)
    Worker(end, start).run(sockets=[listener])


class Worker(uvicorn.Server):
    """uvicorn's server, told by the engine's process when to open and when to end."""

    def __init__(self, end: socket.socket, start: WorkerStart) -> None:
        self._end, self._start = end, start
        self._state = ServerState(start.folder.name, created=start.created)
        self._engine = RemoteLoop(Awake() if start.stays_awake else None)
        self._metrics = ServerMetrics(self._state, start.settings.max_queue, pid=start.engine_pid)
        self._metrics.counts_of_others = self._engine.counts_of_others
        self._service: Service | None = None
        self._channel: Channel | None = None
        super().__init__(uvicorn_config(create_app(self._state, start.settings, self._metrics), start.settings))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until the engine's process says so, or is gone."""
        self._channel = await Channel.open(self._end, self._take, self._gone)
        self._engine.connect(self._channel)
        await super().serve(sockets)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """`serve` in an event loop of its own, which cancels what is given up when `serve` has returned."""
        super().run(sockets)
        self._metrics.settle()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections."""
        await super().startup(sockets)
        self._send(Open())

    def _take(self, message: Any) -> None:
        match message:
            case Answers():
                self._engine.take(message)
            case Status():
                self._note(message)
            case Facts(facts):
                self._load(facts)
            case Count(number):
                self._send(Counted(number, self._metrics.counted()))
            case Drain(now):
                self.should_exit, self.force_exit = True, self.force_exit or now

    def _note(self, status: Status) -> None:
        self._engine.status = status
        self._state.stage = status.stage
        if status.stage == READY and self._service is not None:
            self._state.serve(self._service)

    def _load(self, facts: Any) -> None:
        """In the event loop's thread: until it is done there is nothing to answer but probes, and it takes a second at most."""
        profile = None if self._start.settings.profile_dir is None else RemoteProfile(self._engine)
        try:
            front, layout, chat = self._start.load_parts(self._start.folder, facts)
        except PolyrecError as error:
            self._send(Failed(error))
            self.should_exit = True
            return
        self._state.facts = facts
        self._service = Service(self._engine, front, layout, chat, profile)
        if self._start.stays_awake:
            self._engine.rehearse = Rehearsal(self._service, self._start.settings)
        # What is loaded stays: the collector need not look through it again and again, 30 ms each time.
        gc.collect()
        gc.freeze()
        self._send(Loaded())

    def _gone(self) -> None:
        self._engine.close()
        self.should_exit = True

    def _send(self, message: Any) -> None:
        assert self._channel is not None
        self._channel.send(message)
