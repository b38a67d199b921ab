"""Stand-ins for a vendor's device module, for torch and for the machine, that record what is asked of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from polyrec.hardware.backends.machine import Machine

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorder:
    """Has exactly the functions in `results`; each call is noted, and gives the result, or what the result's function gives."""

    def __init__(self, calls: list[Call] | None = None, prefix: str = "", **results: Any) -> None:
        self.calls: list[Call] = [] if calls is None else calls
        self._prefix = prefix
        self._results = results

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._results:
            raise AttributeError(name)
        result = self._results[name]
        if isinstance(result, Recorder):
            return result

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((self._prefix + name, args, kwargs))
            return result(*args, **kwargs) if callable(result) else result

        return recorded

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def device_module(
    names: tuple[str, ...] = ("Card A", "Card B"), graph_class: str | None = "CUDAGraph", **more: Any
) -> Recorder:
    """What a runtime and a graph need of `torch.cuda` and its like, without a device."""
    calls: list[Call] = []
    streams: dict[str, Any] = {
        "current": Recorder(calls, "default.", wait_stream=None, synchronize=None, wait_event=None)
    }

    def set_stream(stream: Any) -> None:
        streams["current"] = stream

    results: dict[str, Any] = {
        "device_count": lambda: len(names),
        "get_device_name": lambda device: names[device if isinstance(device, int) else device.index],
        "get_device_capability": (9, 0),
        "set_device": None,
        "current_device": 0,
        "init": None,
        "synchronize": None,
        "Stream": lambda **_: Recorder(calls, "side.", wait_stream=None, synchronize=None, wait_event=None),
        "current_stream": lambda *_: streams["current"],
        "set_stream": set_stream,
        "stream": lambda stream: nullcontext(stream),
        "device": lambda device: nullcontext(device),
        "Event": lambda **_: Recorder(calls, "event.", record=None, query=True, synchronize=None, elapsed_time=1.5),
        "mem_get_info": (3 << 30, 8 << 30),
        "max_memory_allocated": 1 << 30,
        "empty_cache": None,
        "manual_seed_all": None,
        "get_rng_state": lambda *_: torch.arange(16, dtype=torch.uint8),
        "set_rng_state": None,
        "graph_pool_handle": (0, 7),
        "nvtx": Recorder(calls, "nvtx.", range_push=0, range_pop=0),
        **more,
    }
    if graph_class:
        parts = {"capture_begin": None, "capture_end": None, "replay": None, "reset": None}
        results[graph_class] = lambda: Recorder(calls, "graph.", **{**parts, **more.get("graph_parts", {})})
    return Recorder(calls, **results)


class HostTensor:
    """A host tensor whose pinning and copying are noted."""

    def __init__(self, calls: list[Call], pinned: bool = False) -> None:
        self._calls = calls
        self._pinned = pinned

    def is_pinned(self) -> bool:
        return self._pinned

    def contiguous(self) -> HostTensor:
        return self

    def pin_memory(self) -> HostTensor:
        self._calls.append(("pin_memory", (), {}))
        return HostTensor(self._calls, pinned=True)

    def to(self, *args: Any, **kwargs: Any) -> str:
        self._calls.append(("to", args, kwargs))
        return "on the device"


def use_everything(runtime: Any, graph: Any) -> None:
    """Calls every function of a runtime and of a graph, so that a recorder shows what they ask of the module."""
    runtime.select(1)
    runtime.enter_thread()
    runtime.device_name()
    stream, event = runtime.stream(), runtime.event(timing=True)
    event.record(runtime.current_stream())
    with runtime.use_stream(stream):
        stream.wait_event(event)
    runtime.synchronize()
    runtime.memory()
    runtime.empty_cache()
    runtime.seed(3)
    runtime.set_rng_state(runtime.rng_state())
    captured = graph.capture(lambda: 1, graph.new_pool())
    captured.replay()
    captured.update({})
    captured.close()


def unknown_calls(calls: list[Call], module: Any, graph_class: str) -> list[str]:
    """The recorded calls that `module`, the real one, has no function for, or not with such arguments."""
    owners = {"side": "Stream", "default": "Stream", "event": "Event", "graph": graph_class}
    unknown = []
    for name, args, kwargs in calls:
        owner, _, method = name.rpartition(".")
        try:
            if owner in owners:
                signature = inspect.signature(getattr(getattr(module, owners[owner]), method))
                signature.bind(None, *args, **kwargs)
            else:
                inspect.signature(_find(module, name)).bind(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            unknown.append(f"{name}{args}{kwargs}: {error}")
    return unknown


def _find(module: Any, path: str) -> Callable[..., Any]:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def torch_package(*, version: str = "2.11.0", cuda: str | None = None, **more: Any) -> SimpleNamespace:
    """A stand-in for torch: its version facts, and device modules by name. hip, maca, xpu_build: as torch.version has them."""
    modules = {name: more.pop(name) for name in ("cuda_module", "xpu_module") if name in more}
    facts = {"cuda": cuda, "hip": more.pop("hip", None), "xpu": more.pop("xpu_build", None), **more}
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(**facts),
        cuda=modules.get("cuda_module"),
        xpu=modules.get("xpu_module"),
    )


def machine_with(
    root: Path, files: dict[str, str], packages: dict[str, Any] | None = None, **environment: str
) -> Machine:
    """A machine that has exactly these files, packages and variables."""
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    packages = packages or {}

    def load(name: str) -> Any:
        if isinstance(packages[name], Exception):
            raise packages[name]
        return packages[name]

    return Machine(root, environment, find=packages.get, load=load)
