"""A toy accelerator in host memory, for what the CPU platform cannot show: graphs that really capture, two devices, no fp8.

Its graph is a tape. During a capture every torch operation is recorded with its tensors; a replay runs the tape again on the
same storages. So whatever the host knew at capture (shapes, Python numbers) is frozen, as on a real device, and an
operation that reads a value on the host, or whose shape depends on values, cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_SEARCH_OPS
from polyrec.hardware.base.backend import Capabilities, HardwareBackend
from polyrec.hardware.base.graph import CapturedGraph, Graph, States
from polyrec.hardware.base.probe import Probe
from polyrec.hardware.ops import REFERENCE_OPS, PlatformOps
from polyrec.hardware.ops.search import SearchOps
from polyrec.hardware.ops.spec import MISSING, group_specs, partial_group

NUM_DEVICES = 2
MAX_GRAPHS = 3

# Their results' shapes, or the host's next step, depend on values.
NOT_CAPTURABLE = (
    "item",
    "is_nonzero",
    "_local_scalar_dense",
    "nonzero",
    "repeat_interleave",
    "masked_select",
    "unique",
    "bincount",
    "equal",
)


class Tape(TorchDispatchMode):
    """Records every operation that runs under it; outputs that are views, or arguments, need no copy at replay."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        masked = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if masked or name.startswith(NOT_CAPTURABLE):
            raise RuntimeError(f"operation '{name}' needs values on the host")
        result = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        fresh = [
            (place, t)
            for place, t in enumerate(tree_flatten(result)[0])
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known
        ]

        def again() -> None:
            found = tree_flatten(func(*args, **kwargs))[0]
            for place, tensor in fresh:
                tensor.copy_(found[place])

        self.steps.append(again)
        return result


class ToyCapturedGraph(CapturedGraph):
    """A tape, and the host values that were frozen into its tasks."""

    def __init__(
        self, owner: ToyGraph, steps: list[Callable[[], None]], result: Any, tasks: dict[str, list[int]]
    ) -> None:
        self._owner = owner
        self._steps = steps
        self._result = result
        self._tasks = tasks

    def replay(self) -> Any:
        with torch.inference_mode():
            for step in self._steps:
                step()
        return self._result

    def update(self, states: States) -> None:
        for name, values in self._tasks.items():
            if name in states:
                values[:] = states[name].tolist()

    def close(self) -> None:
        self._steps = []
        self._owner.live -= 1


class ToyGraph(Graph):
    """At most MAX_GRAPHS graphs at a time."""

    def __init__(self) -> None:
        self.live = 0
        self._tape: Tape | None = None
        self._tasks: dict[str, list[int]] = {}

    def new_pool(self) -> object:
        return object()

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        if self.budget() == 0:
            raise HardwareError("graph_budget_exhausted", f"All {MAX_GRAPHS} graphs are in use.", "Close one.")
        function()  # warm-up
        self._tape, self._tasks = Tape(), {}
        try:
            with torch.inference_mode(), self._tape:
                result = function()
        except RuntimeError as error:
            name = getattr(function, "__qualname__", repr(function))
            raise HardwareError("graph_capture_failed", f"Capturing {name} failed: {error}.") from error
        finally:
            steps, self._tape = self._tape.steps, None
        self.live += 1
        return ToyCapturedGraph(self, steps, result, self._tasks)

    def budget(self) -> int:
        return MAX_GRAPHS - self.live

    def task(self, name: str, lengths: list[int], kernel: Callable[[list[int]], None]) -> None:
        """A kernel whose lengths are host values: a capture freezes them, and only `update` under `name` changes them."""
        if self._tape is None:
            kernel(lengths)
            return
        frozen = self._tasks.setdefault(name, list(lengths))
        self._tape.steps.append(lambda: kernel(frozen))


class ToyRuntime(CpuRuntime):
    """Two devices, both of host memory."""

    index = 0

    def device_count(self) -> int:
        return NUM_DEVICES

    def select(self, index: int) -> None:
        if not 0 <= index < NUM_DEVICES:
            raise HardwareError(
                "device_index", f"There is no device {index}, only 0…{NUM_DEVICES - 1}.", "Name one of them."
            )
        self.index = index

    def device_name(self) -> str:
        return f"toy {self.index}"


class ToyBackend(HardwareBackend):
    """Complete but for fp8."""

    platform_name = "toy"
    device_type = "toy"

    def __init__(self, ops: PlatformOps | None = None) -> None:
        super().__init__(
            runtime=ToyRuntime(),
            graph=ToyGraph(),
            ops=ops or toy_ops(),
            capabilities=Capabilities(captures=True),
        )

    @classmethod
    def probe(cls) -> Probe:
        return Probe.usable(tuple(f"toy {index}" for index in range(NUM_DEVICES)))


def toy_ops() -> PlatformOps:
    """The reference without whatever makes or takes fp8, and without fused operations in two groups."""
    ops = replace(REFERENCE_OPS, search=CUDA_LIKE_SEARCH_OPS)
    for group in ("norm", "act", "linear"):
        own = getattr(ops, group)
        lacking = {name: MISSING for name in group_specs(type(own)) if "fp8" in name or "scaled" in name}
        ops = replace(ops, **{group: replace(own, **lacking)})
    return replace(
        ops,
        norm=replace(ops.norm, add_rms_norm=MISSING),
        rope=replace(ops.rope, qk_norm_rotary=MISSING, qk_norm_rotary_store=MISSING, rotary_store=MISSING),
    )


class HollowToyBackend(ToyBackend):
    """Lacks what nothing can start without."""

    def __init__(self) -> None:
        ops = toy_ops()
        super().__init__(replace(ops, search=partial_group(SearchOps), norm=replace(ops.norm, rms_norm=MISSING)))
