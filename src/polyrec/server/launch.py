"""The server: socket, loading thread, uvicorn in this process or in workers, signals, and the order in which all of it ends."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from ..core.errors import ConfigError
from .app import create_app
from .http import BACKLOG, run_loop, uvicorn_config
from .loading import check_start, load_service, may_stay_awake, num_http_workers
from .logs import FIELDS, LOGGER, configure_logs
from .metrics import ServerMetrics
from .pool import WorkerPool
from .profile import Profile
from .settings import ServerSettings
from .state import DRAINING, ServerState, Service
from .worker import LoadParts, WorkerStart, load_parts

Load = Callable[[Path, ServerSettings, ServerState], Service]


def run_server(
    folder: str | Path,
    settings: ServerSettings,
    load: Load = load_service,
    parts: LoadParts = load_parts,
    stays_awake: bool | None = None,
) -> None:
    """Serves `folder` until SIGTERM or SIGINT, then lets the requests in flight finish, and returns.

    Standard output gets one JSON line when the port is open and one when requests are answered; logs go to standard
    error. Raises PolyrecError when the folder or the address cannot be used, and what loading raised. load, parts: what the
    engine's process loads, and an HTTP worker. stays_awake: whether workers may keep cores busy while they wait; None: by the
    machine.
    """
    folder = Path(folder).resolve()
    num_workers = settings.http_workers or 0
    if load is load_service:
        check_start(folder, settings)
        num_workers = num_http_workers(settings)
        stays_awake = may_stay_awake(settings, num_workers) if stays_awake is None else stays_awake
    state = ServerState(model_name=folder.name)
    with listen(settings.host, settings.port) as listener:
        configure_logs(settings.log_level)
        url = _url(settings.host, listener)
        if num_workers:
            start = WorkerStart(folder, settings, state.created, os.getpid(), parts, bool(stays_awake))
            pool = WorkerPool(num_workers, start, listener, state, functools.partial(_tell, url))
            service = run_loop(pool.run(lambda: _load_for_good(load, folder, settings, state)))
        else:
            _tell(url, "loading")
            service = _serve_here(folder, settings, load, state, listener, url)
    if isinstance(service.profile, Profile):
        service.profile.end()
    service.loop.drain(settings.timeout)
    logging.getLogger(LOGGER).info("stopped", extra={FIELDS: {"requests": service.loop.stats.get("requests", 0)}})


def _load_for_good(load: Load, folder: Path, settings: ServerSettings, state: ServerState) -> Service:
    """Loads, and spares Python's collector what is there then: 350,000 objects, most of them torch's. Looking through them
    takes 100 ms and more, which stops all threads and came every few hundred answers of 512 items."""
    service = load(folder, settings, state)
    gc.collect()
    gc.freeze()
    return service


def _serve_here(
    folder: Path, settings: ServerSettings, load: Load, state: ServerState, listener: socket.socket, url: str
) -> Service:
    """HTTP in this process's main thread."""
    metrics = ServerMetrics(state, settings.max_queue)
    server = _Server(uvicorn_config(create_app(state, settings, metrics), settings), state)
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
        loading = loader.submit(_load_for_good, load, folder, settings, state)
        loading.add_done_callback(lambda done: _loaded(done, server, url))
        with _signals_end(server):
            server.run(sockets=[listener])
            metrics.settle()
    # The executor was left, so loading has ended and its future holds a service or an error.
    return loading.result()


class _Server(uvicorn.Server):
    """uvicorn's server, which tells /ready when it begins to drain."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.served = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: stop accepting and finish what is in flight. A second SIGINT: stop at once."""
        self.served.stage = DRAINING
        super().handle_exit(sig, frame)


def _loaded(loading: Future[Service], server: _Server, url: str) -> None:
    """Runs in the loading thread: opens the service, or ends the server when loading failed."""
    if loading.exception() is not None:
        server.should_exit = True
    elif server.served.stage != DRAINING:
        server.served.serve(loading.result())
        _tell(url, "ready")


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; a used port or an unknown host is a ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol matters: asyncio switches Nagle's delay off only for sockets that say they are TCP, and with it
        # on, an answer's headers and body leave 40 ms apart.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host_unknown", f"Cannot listen on '{host}': {error}.", "Check --host.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "address_unusable",
            f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}.",
            "Choose another --port (0: any free one) or --host.",
        ) from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell(url: str, stage: str) -> None:
    try:
        print(json.dumps({"url": url, "stage": stage}), flush=True)
    except BrokenPipeError:
        # Who started us has read what it wanted and closed the pipe. Without this, the line left in Python's buffer
        # would fail once more at exit and turn exit code 0 into 120.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def _signals_end(server: _Server) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT end `server`, also before and after uvicorn's own handlers are in place.

    uvicorn raises the signals it caught again when it has ended, for the handlers that were there before; Python's own
    would end this process with the signal instead of with exit code 0. Outside, a signal kills as usual.
    """
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
