"""Times prefill attention on a device that torch shows as cuda: our backends, and what torch itself offers, on the same inputs.

Queries, keys and values (16, 8 and 8 heads of 128, bf16) are views of one product, as the model gives them. Device times are
medians over replays of a graph; host times are what one eager call takes to be queued, and what the plan of a batch takes. The
first call is of a shape that was not seen before, once the kernels are there. Every result is compared with fp32.

Shapes with cached tokens are measured over 28 layers of a cache, as in a model, by backends that read one; `triton recorded` is
what a recorded prefill runs: 32 places, room for longer prompts, and lengths that only the device knows.

    python benchmarks/attention.py
    python benchmarks/attention.py --only triton --shapes 1x15+2440 8x15+2440
    python benchmarks/attention.py --only triton --shapes 8x1008 1x777 --out benchmarks/results/attention.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import triton
from facts import origin
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import pad
from polyrec.core.errors import PolyrecError
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.backends.cuda_like import NvidiaBackend
from polyrec.hardware.base.attention import AttentionBackend, AttentionNeeds, PackedLayout, PageTable
from polyrec.kvcache.options import PAGE_SIZE
from polyrec.kvcache.pool import KVPool

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 8, 128, 28
NEEDS = AttentionNeeds(LAYERS, HEADS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
SHAPES = ("1x2464", "8x2464", "32x304", "8x1008", "8x5008", "mixed", "1x15+2440", "8x15+2440")
MIXED = (304, 2464, 61, 1008, 305, 5008, 128, 777, 2455, 310, 33, 1500, 640, 300, 998, 2001)
BACKENDS = ("flashinfer", "triton", "sdpa")
SPREAD = 256 * 1024**2  # bytes over which the inputs of one graph lie
MOST_SETS = 8
PLACES, ROOM = 32, 8192  # of a recorded prefill: requests, and tokens of a prompt
LIMIT = 0.01  # of ‖found − reference‖ / ‖reference‖

Rows = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = Callable[[list[int], PackedLayout], Run]


@dataclass(frozen=True)
class Measured:
    """shape and way; microseconds on the device, of the host for a call and for a plan; milliseconds of the first call of a new
    shape; TFLOP/s of the scores and sums that a causal mask leaves; relative error."""

    shape: str
    way: str
    device_us: float
    tflops: float
    host_us: float
    plan_us: float
    first_ms: float
    error: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="REQUESTSxTOKENS, REQUESTSxNEW+CACHED, or mixed")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of ways")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a device that torch shows as cuda, and there is none.", file=sys.stderr)
        return 1
    facts = origin("attention.py", packages=("torch",))
    backend = NvidiaBackend()
    backend.runtime.select(0)
    facts["machine"] |= {"device": backend.runtime.device_name(), "triton": triton.__version__}
    chosen = lambda names: [name for name in names if not args.only or any(o in name for o in args.only)]  # noqa: E731
    built = backends_here(facts)
    packed_ways = {name: packed_way(attention) for name, attention in built.items()}
    packed_ways |= {"cudnn padded": cudnn_padded, "flash varlen": flash_varlen}
    rest_ways = {name: attention for name, attention in built.items() if attention.support.prefix}
    if "triton" in built:
        rest_ways["triton recorded"] = built["triton"]
    print(
        f"{'shape':10}{'way':17}{'device us':>11}{'TFLOP/s':>9}{'host us':>9}{'plan us':>9}{'first ms':>10}{'error':>9}"
    )
    found = []
    for shape in args.shapes:
        for name in chosen(rest_ways if "+" in shape else packed_ways):
            try:
                if "+" in shape:
                    one = measure_rest(backend, shape, name, rest_ways[name], args.replays)
                else:
                    one = measure(backend, shape, name, packed_ways[name], args.replays)
            except RuntimeError as error:
                if name in BACKENDS:
                    raise
                print(f"{shape:10}{name:17} is left out: {str(error).splitlines()[0]}")
                continue
            found.append(one)
            print(
                f"{one.shape:10}{one.way:17}{one.device_us:11.1f}{one.tflops:9.0f}{one.host_us:9.1f}{one.plan_us:9.1f}"
                f"{one.first_ms:10.2f}{one.error:9.4f}",
                flush=True,
            )
    wrong = [one for one in found if not one.error <= LIMIT]
    for one in wrong:
        print(f"WRONG: {one.way} at {one.shape} differs from the reference by {one.error:.3g}")
    if args.out:
        result = {"origin": facts, "mixed": MIXED, "ways": [asdict(one) for one in found]}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return bool(wrong)


def backends_here(facts: dict) -> dict[str, AttentionBackend]:
    """Our backends, those whose package is here. Notes how long each took to build."""
    built: dict[str, AttentionBackend] = {}
    for name in BACKENDS:
        began = time.perf_counter()
        try:
            hardware = build_hardware_backend(HardwareConfig(hardware_platform="nvidia", attention=name))
            built[name] = hardware.attention.build(NEEDS, hardware.ops)
        except PolyrecError as error:
            print(f"{name} is left out: {error}")
            continue
        facts["machine"][f"seconds to build {name}"] = round(time.perf_counter() - began, 2)
        if name == "flashinfer":
            facts["machine"]["versions"]["flashinfer-python"] = version("flashinfer-python")
    return built


def packed_way(attention: AttentionBackend) -> Way:
    def way(lengths: list[int], layout: PackedLayout) -> Run:
        plan = attention.packed(layout)
        return lambda q, k, v: plan.run(0, q, k, v)

    return way


def cudnn_padded(lengths: list[int], layout: PackedLayout) -> Run:
    """Equal lengths are a view; others are copied into place and back."""
    shape = (len(lengths), max(lengths))
    flat = None if min(lengths) == max(lengths) else layout.flat

    def run(*rows: Tensor) -> Tensor:
        q, k, v = (pad(x, shape, flat).transpose(1, 2) for x in rows)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        return (out if flat is None else out.index_select(0, flat)).flatten(1)

    return run


def flash_varlen(lengths: list[int], layout: PackedLayout) -> Run:
    """What `torch.nn.attention.varlen` calls."""
    bounds, longest = bounds_of(lengths), max(lengths)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, longest, longest, 0.0, True, False)[
            0
        ].flatten(1)

    return run


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def lengths_of(shape: str) -> list[int]:
    if shape == "mixed":
        return list(MIXED)
    requests, tokens = map(int, shape.split("x"))
    return [tokens] * requests


def draw(lengths: list[int]) -> Rows:
    fused = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda").to(torch.bfloat16)
    return fused.unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)


@torch.inference_mode()
def measure(backend: NvidiaBackend, shape: str, name: str, way: Way, replays: int) -> Measured:
    """Checks one call, then times it on several sets of inputs."""
    lengths = lengths_of(shape)

    def planned(lengths: list[int]) -> Run:
        return way(lengths, packed_layout(torch.tensor(lengths), to_device=backend.runtime.to_device))

    rows = draw(lengths)
    run = planned(lengths)
    error = error_of(run(*rows), rows, lengths)
    first = first_call(planned, [length + 1 for length in lengths])
    layout = packed_layout(torch.tensor(lengths), to_device=backend.runtime.to_device)
    plan_us = 1e6 * statistics.median(timed(lambda: way(lengths, layout)) for _ in range(5))
    run = way(lengths, layout)
    host_us = 1e6 * statistics.median(timed(lambda: run(*rows)) for _ in range(11))
    sets = max(1, min(MOST_SETS, SPREAD // (2 * rows[0].numel() * 2)))
    inputs = [rows, *(draw(lengths) for _ in range(sets - 1))]
    device_us = graph_time(backend, lambda: [run(*one) for one in inputs], replays) / sets
    flops = sum(4 * HEADS * HEAD_DIM * length * (length + 1) / 2 for length in lengths)
    return Measured(shape, name, device_us, flops / device_us / 1e6, host_us, plan_us, 1e3 * first, error)


@torch.inference_mode()
def measure_rest(backend: NvidiaBackend, shape: str, name: str, attention: AttentionBackend, replays: int) -> Measured:
    """The last tokens of prompts whose beginnings are cached: each layer's call, keys and values written before."""
    requests, tokens = shape.split("x")
    new, cached = map(int, tokens.split("+"))
    count, recorded = int(requests), name.endswith("recorded")

    def layout_of(new: int, cached: int) -> PackedLayout:
        columns = -(-(new + cached) // PAGE_SIZE)
        pages = 1 + torch.randperm(count * columns, dtype=torch.int32).view(count, columns)
        table = PageTable(pages, PAGE_SIZE, new + cached, torch.full((count,), cached))
        layout = packed_layout(torch.full((count,), new), to_device=backend.runtime.to_device, table=table)
        return recorded_layout(layout) if recorded else layout

    slots = (count * -(-(new + cached) // PAGE_SIZE) + 2 * count) * PAGE_SIZE
    pool = KVPool(LAYERS, slots, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=backend.runtime.device)
    for part in (pool.keys, pool.values):
        part.normal_()
    rows, layout = draw([new] * count), layout_of(new, cached)
    plan = attention.packed(layout, pool)
    found = plan.run(0, *rows)
    keys, values = (part[layout.prompt_slots[:count, : new + cached]] for part in pool.layer(0))
    error = rest_error(found, rows[0].unflatten(0, (count, new)), keys, values)

    def whole(layout: PackedLayout) -> None:
        attention.packed(layout, pool).run_written(0, *rows)
        torch.cuda.synchronize()

    first = timed(lambda: whole(layout_of(new, cached + 1)))
    plan_us = 1e6 * statistics.median(timed(lambda: attention.packed(layout, pool)) for _ in range(5))
    plan = attention.packed(layout, pool)
    host_us = 1e6 * statistics.median(timed(lambda: plan.run_written(0, *rows)) for _ in range(11))
    calls = lambda: [plan.run_written(layer, *rows) for layer in range(LAYERS)]  # noqa: E731
    device_us = graph_time(backend, calls, replays) / LAYERS
    flops = 4 * HEADS * HEAD_DIM * count * (new * cached + new * (new + 1) / 2)
    return Measured(shape, name, device_us, flops / device_us / 1e6, host_us, plan_us, 1e3 * first, error)


def recorded_layout(layout: PackedLayout) -> PackedLayout:
    """The same sequences as a recorded prefill of so many rows knows them."""
    table = layout.table
    assert table is not None
    assert table.cached is not None
    pages = table.pages.new_zeros((PLACES, ROOM // PAGE_SIZE))
    pages[: len(table.pages), : table.pages.shape[1]] = table.pages
    lengths, cached = layout.lengths.new_zeros(PLACES), layout.lengths.new_zeros(PLACES)
    lengths[: len(layout.lengths)], cached[: len(layout.lengths)] = layout.lengths, table.cached
    return PackedLayout(lengths, layout.num_tokens, layout.num_tokens, table=PageTable(pages, PAGE_SIZE, ROOM, cached))


def rest_error(found: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> float:
    """Against torch's attention in fp32. query [R, new, heads, D], keys and values [R, L, kv heads, D]."""
    new, length = query.shape[1], keys.shape[1]
    seen = torch.ones(new, length, dtype=torch.bool, device=keys.device).tril(length - new)
    k, v = (part.float().transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
    expected = scaled_dot_product_attention(query.float().transpose(1, 2), k, v, attn_mask=seen)
    expected = expected.transpose(1, 2).reshape(found.shape)
    return float((found.float() - expected).norm() / expected.norm())


def timed(call: Callable[[], object]) -> float:
    """Seconds of the host; the device is idle before."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def first_call(planned: Callable[[list[int]], Run], lengths: list[int]) -> float:
    """Seconds from the plan to the result."""
    rows = draw(lengths)

    def whole() -> None:
        planned(lengths)(*rows)
        torch.cuda.synchronize()

    return timed(whole)


def error_of(found: Tensor, rows: Rows, lengths: list[int]) -> float:
    """Against torch's attention in fp32, one sequence at a time."""
    parts = []
    for q, k, v in zip(*(part.split(lengths) for part in rows), strict=True):
        q, k, v = (part.float().transpose(0, 1)[None] for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1))
    expected = torch.cat(parts)
    return float((found.float() - expected).norm() / expected.norm())


def graph_time(backend: NvidiaBackend, calls: Callable[[], object], replays: int) -> float:
    """Median microseconds of one replay."""
    captured = backend.graph.capture(calls)
    times = []
    for number in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    captured.close()
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
