"""Where a batch's time goes: the device's kernels (on a CPU, torch's operations) by family, launch gaps, roofline share."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile

from ..engine.recommender import Recommender
from ..engine.trace import export_trace
from ..hardware.base.runtime import Runtime
from ..models.spec import Decoder
from .cases import Case, Target, fresh_seed
from .offline import prepare
from .roofline import Ceilings, phases

# The first family whose pattern a name holds takes it; the order matters: `scaled_mm` before `mm`, attention before products.
FAMILIES = {
    "attention": r"attention|flash|fmha|sdpa|packed_kernel|prompt_kernel|merge_kernel|join_own|prefill|merge_state",
    "search": r"count_kernel|children_kernel|next_rows|(?<!index)(?<!index_)select|log_sum_exp|beam|topk|sort|radix"
    r"|log_?softmax|searchsorted|cumsum|scan",
    "products": r"gemm|scaled_mm|nvjet|cutlass|xmma|gemv|addmm|\bmm\b|matmul|linear|bmm|splitKreduce|cublas",
    "rotary and cache": r"rotary|rope|\b_rotate|\b_angles|\b_locate|store_kv|kv_cache|write_kv",
    "norms": r"norm",
    "activation": r"silu|swiglu|gelu",
    "quantise": r"quant|e4m3|fp8",
    "copies": r"memcpy|memset|copy|fill|_to_copy|cat\b|CatArray",
    "embedding and gather": r"embedding|index|gather",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in FAMILIES.items()}
OTHER = "other"


@dataclass(frozen=True)
class Kernel:
    """One name: how often it ran, and the microseconds in all that it filled."""

    name: str
    calls: int
    microseconds: float


def family_of(name: str) -> str:
    """The family of a kernel's (or operation's) name."""
    return next((family for family, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


def run_case(
    recommender: Recommender,
    model: Decoder,
    target: Target,
    case: Case,
    runtime: Runtime,
    ceilings: Ceilings,
    *,
    batches: int,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Times batches without a profiler, then as many with one. trace: a Chrome trace of those.

    Shares are of the time without the profiler: what no kernel fills is launch gaps and the host.
    """
    prepared = prepare(recommender, target.histories(case.load * (2 * batches + 3), case.items, fresh_seed()), case.n)
    searches = [one.search for one in prepared]
    groups = [searches[start : start + case.load] for start in range(0, len(searches), case.load)]
    for group in groups[:3]:
        recommender.engine.run(group)
    seconds = []
    for group in groups[3 : 3 + batches]:
        start = time.perf_counter()
        recommender.engine.run(group)
        seconds.append(time.perf_counter() - start)
    with profile(activities=runtime.profiler_activities()) as profiler:
        for group in groups[3 + batches :]:
            recommender.engine.run(group)
        runtime.synchronize()
    if trace is not None:
        export_trace(profiler, trace)
    kernels = kernels_of(profiler.events())
    wall_ms = statistics.median(seconds) * 1e3
    bounds = phases(model, recommender.layout, target.tokens_of(case.items), case.n, case.load)
    roofline_ms = sum(phase.seconds(ceilings) for phase in bounds) * 1e3
    families = by_family(kernels, batches, wall_ms)
    busy_ms = sum(row["ms"] for row in families)
    return {
        "tokens": target.tokens_of(case.items),
        "items": case.items,
        "n": case.n,
        "batch": case.load,
        "wall_ms": wall_ms,
        "busy_ms": busy_ms,
        "gaps_ms": wall_ms - busy_ms,
        "launches": sum(kernel.calls for kernel in kernels) / batches,
        "roofline_ms": roofline_ms,
        "roofline_share": roofline_ms / wall_ms,
        "phases": [
            {
                "name": phase.name,
                "gflop": (phase.flops + phase.fp8_flops) / 1e9,
                "mb": phase.bytes / 1e6,
                "least_ms": phase.seconds(ceilings) * 1e3,
            }
            for phase in bounds
        ],
        "families": families,
        "kernels": [
            {"name": kernel.name, "calls": kernel.calls / batches, "ms": kernel.microseconds / batches / 1e3}
            for kernel in sorted(kernels, key=lambda kernel: -kernel.microseconds)[:40]
        ],
    }


def write_trace(recommender: Recommender, target: Target, case: Case, runtime: Runtime, path: Path) -> None:
    """A Chrome trace of three batches of an engine that has run such a batch before."""
    prepared = prepare(recommender, target.histories(case.load * 3, case.items, fresh_seed()), case.n)
    with profile(activities=runtime.profiler_activities()) as profiler:
        for start in range(0, len(prepared), case.load):
            recommender.engine.run([one.search for one in prepared[start : start + case.load]])
        runtime.synchronize()
    export_trace(profiler, path)


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """What ran on a device, by name; where nothing did, the host's operations, each without the time of those it calls.

    A kernel that is there before another one has ended, as those do that begin early, fills the time from that one's end on.
    """
    events = list(events)
    on_device = [event for event in events if event.device_type != DeviceType.CPU]
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    filled = 0.0
    for event in sorted(on_device, key=lambda event: event.time_range.start) or events:
        calls[event.name] += 1
        if on_device:
            begin, filled = max(event.time_range.start, filled), max(event.time_range.end, filled)
            spent[event.name] += max(filled - begin, 0.0)
        else:
            spent[event.name] += event.self_cpu_time_total
    return [Kernel(name, calls[name], spent[name]) for name in calls if spent[name] > 0]


def by_family(kernels: Iterable[Kernel], batches: int, wall_ms: float) -> list[dict[str, Any]]:
    """ms and launches of a batch and the share of its time, the family that takes most first."""
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        spent[family_of(kernel.name)] += kernel.microseconds / 1e3 / batches
        calls[family_of(kernel.name)] += kernel.calls
    return [
        {"family": name, "ms": ms, "launches": calls[name] / batches, "share": ms / wall_ms}
        for name, ms in sorted(spent.items(), key=lambda item: -item[1])
    ]
