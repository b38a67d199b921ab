"""Times the attention of a search's pass on a device that torch shows as cuda: beams that read their requests' prompts.

A request's beams share its prompt, which lies in pages of a cache; each beam also has a token of its own from the pass before,
and its new one. Times are medians over replays of a graph that holds one pass of a few layers, and are told for one layer; the
rate counts the products of the prompt alone.

    python benchmarks/beam_attention.py                       # a table, half a minute on an H200
    python benchmarks/beam_attention.py --shapes 1x50x2457 8x256x1001 --out beams.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from facts import origin

from attention import HEAD_DIM, HEADS, KV_HEADS, graph_time
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.base.attention import AttentionNeeds, PackedLayout, PageTable
from polyrec.hardware.base.backend import HardwareBackend
from polyrec.kvcache.options import PAGE_SIZE
from polyrec.kvcache.pool import KVPool

LAYERS = 4  # whose pages together are larger than the L2 cache, for all but the smallest shapes
ROOM = 8192  # tokens of a prompt that a recorded search has room for
NEEDS = AttentionNeeds(LAYERS, HEADS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
SHAPES = (
    "1x50x2457", "8x50x2457", "32x50x305", "8x512x305", "1x256x1001", "8x256x1001", "4x256x5001", "8x1000x2457",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """shape: requests x beams x prompt tokens. us: of one layer. tflops: of the products with the prompts."""

    shape: str
    us: float
    tflops: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="requests x beams x prompt tokens")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a device that torch shows as cuda, and there is none.", file=sys.stderr)
        return 1
    facts = origin("beam_attention.py", packages=("torch",))
    backend = build_hardware_backend(HardwareConfig(hardware_platform="nvidia", attention="triton"))
    facts["machine"] |= {"device": backend.runtime.device_name(), "triton": triton.__version__}
    print(f"{'shape':14}{'us a layer':>12}{'TFLOP/s':>10}")
    found = []
    for shape in args.shapes:
        one = measure(backend, shape, args.replays)
        found.append(one)
        print(f"{one.shape:14}{one.us:12.1f}{one.tflops:10.0f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"origin": facts, "passes": list(map(asdict, found))}, indent=1))
    return 0


@torch.inference_mode()
def measure(backend: HardwareBackend, shape: str, replays: int) -> Measured:
    """The last pass of three levels, which keeps nothing."""
    requests, width, tokens = map(int, shape.split("x"))
    device, rows = backend.runtime.device, requests * width
    pages_each = -(-tokens // PAGE_SIZE)
    pages = torch.zeros((requests, ROOM // PAGE_SIZE), dtype=torch.int32, device=device)
    pages[:, :pages_each] = (torch.randperm(requests * pages_each, device=device) + 1).view(requests, -1)
    lengths = torch.full((requests,), tokens, device=device)
    table = PageTable(pages, PAGE_SIZE, ROOM, torch.zeros_like(lengths))
    layout = PackedLayout(lengths, ROOM, ROOM, table=table)
    num_slots = (requests * pages_each + 1) * PAGE_SIZE
    pool = KVPool(LAYERS, num_slots, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
    for part in (part for layer in range(LAYERS) for part in pool.layer(layer)):
        part.normal_()
    search = backend.attention.build(NEEDS, backend.ops).search(layout, pool, width=width, num_kept=1)
    none = torch.zeros((rows, 0), dtype=torch.int64, device=device)
    parents = torch.randint(0, width, (rows, 1), device=device)
    parents += (torch.arange(rows, device=device) // width * width)[:, None]
    heads = HEADS + 2 * KV_HEADS
    fused = torch.randn(rows, heads * HEAD_DIM, device=device, dtype=torch.bfloat16).unflatten(1, (heads, HEAD_DIM))
    query, key, value = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    first, last = search.step(none, last=False), search.step(parents, last=True)
    for layer in range(LAYERS):
        first.run(layer, query, key, value)  # keeps what the last pass finds through its ancestors
    us = graph_time(backend, lambda: [last.run(layer, query, key, value) for layer in range(LAYERS)], replays) / LAYERS
    return Measured(shape, us, 4 * rows * tokens * HEADS * HEAD_DIM / us / 1e6)


if __name__ == "__main__":
    sys.exit(main())
