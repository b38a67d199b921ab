"""From a model folder to a service that answers: the stages that /ready tells, in order. Only this file loads torch."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CheckpointError, ConfigError
from ..core.request import RecommendRequest
from .chat import ChatPrompt, load_template
from .logs import FIELDS, LOGGER
from .profile import Profile, writable_folder
from .settings import ServerSettings
from .state import ServerState, Service

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.loop import EngineLoop
    from ..hardware.base.backend import HardwareBackend
    from ..hardware.base.runtime import Runtime
    from ..kvcache.options import KVConfig

NEEDED_FILES = ("config.json", "tokenizer.json", "catalog.parquet")
# Of a device with a memory of its own, which has nothing else to do; the rest is for recorded graphs, what a prefill computes
# with, and the libraries' own needs.
MEMORY_FRACTION = 0.9
CORES_A_WORKER = 4
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # "quota period" in microseconds, or "max period"


def check_start(folder: Path, settings: ServerSettings) -> None:
    """What must be right before a port is opened: the platform is there and complete, and the folder has its files."""
    from ..hardware import get_hardware_backend

    get_hardware_backend(settings.hardware)
    if settings.profile_dir is not None:
        writable_folder(settings.profile_dir)
    if not folder.is_dir():
        raise CheckpointError(
            "model_folder_missing", f"There is no folder {folder}.", "Give a model folder made by `polyrec train`."
        )
    if missing := [name for name in NEEDED_FILES if not (folder / name).is_file()]:
        raise CheckpointError(
            "model_folder_incomplete",
            f"{folder} lacks {', '.join(missing)}.",
            "Give a model folder made by `polyrec train`.",
        )


def num_http_workers(settings: ServerSettings) -> int:
    """HTTP workers: as set; else none where the CPU is the device (they would take its cores), and a quarter of the cores, four
    at most, beside an accelerator: of the time between two launches, HTTP in the engine's own process would take most."""
    if settings.http_workers is not None:
        return settings.http_workers
    from ..hardware import get_hardware_backend

    if not get_hardware_backend(settings.hardware).capabilities.async_copies:
        return 0
    return min(num_cores() // CORES_A_WORKER, 4)


def may_stay_awake(settings: ServerSettings, num_workers: int) -> bool:
    """Whether workers may keep a core busy each while they wait: beside an accelerator, where three of four cores are left."""
    from ..hardware import get_hardware_backend

    beside_device = get_hardware_backend(settings.hardware).capabilities.async_copies
    return beside_device and num_cores() >= CORES_A_WORKER * num_workers


def num_cores() -> int:
    """Cores that this process may use, or whose time its container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return cores


class Stages:
    """What is under way at the start, told in a server's state; and how long each stage took."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._began: list[tuple[str, float]] = []

    def begin(self, stage: str) -> None:
        self._state.stage = stage
        self._began.append((stage, time.monotonic()))

    def seconds(self) -> dict[str, float]:
        """By stage; the last one lasts until now."""
        ends = [began for _, began in self._began[1:]] + [time.monotonic()]
        return {
            f"{stage}_seconds": round(end - began, 2) for (stage, began), end in zip(self._began, ends, strict=True)
        }


def load_service(folder: Path, settings: ServerSettings, state: ServerState) -> Service:
    """Loads the model, starts its engine thread and has it answer one request, telling each stage in `state`."""
    stages = Stages(state)
    stages.begin("loading_model")
    import torch

    from ..engine.engine import EngineConfig
    from ..engine.graphs import graph_sizes
    from ..engine.loop import EngineLoop
    from ..engine.recommender import Recommender
    from ..engine.scheduler import BatchLimits
    from ..hardware import get_hardware_backend

    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    backend = get_hardware_backend(settings.hardware)
    config = EngineConfig(
        score_rule=settings.score_rule,
        limits=BatchLimits(max_requests=settings.max_batch, max_tokens=settings.max_batch_tokens),
        graphs=None if settings.eager else graph_sizes(settings.max_beam_width),
        model=settings.model,
        kv=served_kv(settings.kv, backend),
    )
    recommender = Recommender.from_pretrained(folder, backend=backend, config=config)
    chat = ChatPrompt(recommender.tokenizer, recommender.layout, load_template(folder))
    state.facts = recommender.front.facts
    stages.begin("recording_graphs")
    recommender.engine.record_graphs()
    tell_memory(recommender.engine, settings.kv)
    stages.begin("warming_up")
    loop = EngineLoop(recommender, max_queue=settings.max_queue)
    loop.start()
    _answer_one(loop, recommender.catalog.item_ids[0])
    recommender.front.make_ready()
    profile = _profile_of(loop, backend.runtime, settings.profile_dir)
    logging.getLogger(LOGGER).info("the engine is ready", extra={FIELDS: stages.seconds()})
    return Service(loop, recommender.front, recommender.layout, chat, profile, loop.attend)


def served_kv(kv: KVConfig, backend: HardwareBackend) -> KVConfig:
    """A server's own device is for it to fill. The host's memory is not, nor is a copy to it asynchronous: there, without a
    fraction, the cache holds what the largest batches need. Error: `host_cache_unused`."""
    if kv.host_cache_gib > 0 and not (kv.prefix_cache and backend.capabilities.async_copies):
        there = f"platform '{backend.platform_name}' keeps them there anyway"
        why = there if kv.prefix_cache else "without a prefix cache none are"
        raise ConfigError(
            "host_cache_unused",
            f"--host-cache-gib is for pages that are kept in the host's memory, and {why}.",
            "Leave it out.",
        )
    if kv.memory_fraction is None and backend.capabilities.async_copies:
        return kv.model_copy(update={"memory_fraction": MEMORY_FRACTION})
    return kv


def tell_memory(engine: Engine, kv: KVConfig) -> None:
    """The one log line about memory at the start."""
    prefixes = engine.memory.prefixes
    off = "off: the attention cannot go on from a cached beginning" if kv.prefix_cache else "off"
    fields = {"prefix_cache": "on" if prefixes.enabled else off, "graph_bytes": engine.graph_bytes}
    logging.getLogger(LOGGER).info("keys and values: %s", engine.memory.size, extra={FIELDS: fields})


def _profile_of(loop: EngineLoop, runtime: Runtime, folder: Path | None) -> Profile | None:
    from ..engine.trace import Tracer

    return None if folder is None else Profile(loop, Tracer(runtime, writable_folder(folder)))


def _answer_one(loop: EngineLoop, item_id: str) -> None:
    """Ready means that a request was answered; an engine that fails on it ends the start with its error."""
    future = loop.submit(RecommendRequest(history=[item_id], n=1))
    while not wait([future], timeout=0.5).done:
        if not loop.is_alive:
            raise RuntimeError("The engine's thread ended on its first request; its traceback is above.")
    future.result()
