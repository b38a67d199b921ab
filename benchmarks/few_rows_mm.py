"""Products of few e4m3 rows: the Triton kernel beside torch._scaled_mm, on the 1.7B model's shapes.

Each time is the median over replays of a graph that holds one call for each of several weights, together larger than the L2
cache, as in a model's pass. With --sweep every tile that may do is timed, not only the one that `ops/few_rows.py` chooses: that
file's constants come from what is best here.

    python benchmarks/few_rows_mm.py             # 20 rows of a table, under a minute on an H200
    python benchmarks/few_rows_mm.py --sweep --out benchmarks/results/few_rows_mm.json      # some minutes on 16 cores
    python benchmarks/few_rows_mm.py --sweep --only down --rows 50
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from facts import origin
from kernels import FP8, MOST_SETS, PRODUCTS, SPREAD, normal, relative_error, time_of
from torch import Tensor

from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, NvidiaBackend
from polyrec.hardware.backends.cuda_like.kernels.few_rows_mm import few_rows_scaled_mm, few_rows_scaled_mm_sum
from polyrec.hardware.backends.cuda_like.ops.few_rows import COLUMNS, Tiling, takes, tiling
from polyrec.hardware.ops import REFERENCE_OPS

MOST_ERROR = (
    0.02  # ‖found − reference‖ / ‖reference‖ in bf16; the reference sums in fp32, Hopper's matrix units in 14 bits
)
SHARED_MEMORY = 220 * 1024
SHOWN = 5  # of a sweep's tiles for one shape
TILES = tuple((rows, columns) for rows in (64, 128) for columns in COLUMNS if rows == 64 or columns >= 64)

Product = tuple[Tensor, Tensor, Tensor, Tensor]  # q, its scales, the weight, its scales


@dataclass(frozen=True)
class Timed:
    """One tile's microseconds, its relative error, and whether every bit of its result is torch's."""

    tiling: Tiling
    us: float
    error: float
    as_torch: bool


@dataclass(frozen=True)
class Measured:
    """One shape: bytes of the weight; torch's microseconds and relative error; the kernel with the chosen tile; whether it is
    used there; the best of a sweep, fastest first."""

    name: str
    rows: int
    weight_bytes: int
    torch_us: float
    torch_error: float
    chosen: Timed
    used: bool
    best: list[Timed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 50, 100, 256, 512])
    parser.add_argument("--only", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--sweep", action="store_true", help="time every tile that may do")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--processes", type=int, default=12, help="that compile at a time")
    parser.add_argument("--ceiling", type=float, default=4.27, help="TB/s of a large copy on this device")
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a device that torch shows as cuda, and there is none.", file=sys.stderr)
        return 1
    facts = origin("few_rows_mm.py", packages=("torch",))
    cases = [(name, rows) for name in args.only for rows in args.rows]
    if args.sweep:
        compile_all({tile for name, rows in cases for tile in candidates(rows, *PRODUCTS[name])}, args.processes)
    backend = NvidiaBackend()
    backend.runtime.select(0)
    facts["machine"] |= {"device": backend.runtime.device_name(), "triton": triton.__version__}
    print(f"{'product':9}{'rows':>5}{'floor us':>10}{'torch us':>10}{'kernel us':>11}{'ratio':>7}  {'used':5}tile")
    found = []
    for name, rows in cases:
        one = measure(backend, name, rows, args.sweep, args.replays)
        found.append(one)
        print(line(one, args.ceiling), flush=True)
    if args.out:
        result = {"origin": facts, "ceiling_tb_s": args.ceiling, "products": [plain(one) for one in found]}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def line(one: Measured, ceiling: float) -> str:
    text = (
        f"{one.name:9}{one.rows:5}{one.weight_bytes / ceiling / 1e6:10.2f}{one.torch_us:10.2f}{one.chosen.us:11.2f}"
        f"{one.torch_us / one.chosen.us:7.2f}  {'yes' if one.used else 'no':5}{described(one.chosen)}"
    )
    return "\n".join(
        (text, *(f"{'':34}{tile.us:11.2f}{one.torch_us / tile.us:7.2f}  {'':5}{described(tile)}" for tile in one.best))
    )


def described(tile: Timed) -> str:
    """rows, columns, splits, depth, stages, warps."""
    return " ".join(map(str, tile.tiling)) + (" (torch's bits)" if tile.as_torch else "")


def plain(one: Measured) -> dict[str, object]:
    """For JSON: tiles as objects with names."""
    tiles = [
        {
            **tile.tiling._asdict(),
            "us": round(tile.us, 2),
            "error": float(f"{tile.error:.2g}"),
            "as_torch": tile.as_torch,
        }
        for tile in (one.chosen, *one.best)
    ]
    return {
        **asdict(one),
        "torch_us": round(one.torch_us, 2),
        "torch_error": float(f"{one.torch_error:.2g}"),
        "chosen": tiles[0],
        "best": tiles[1:],
    }


def candidates(rows: int, outputs: int, inputs: int) -> Iterator[Tiling]:
    """The chosen tile, and all that leave no more than two multiprocessors of three idle and go around three times at most."""
    chosen = tiling(rows, outputs, inputs)
    yield chosen
    for tall, wide in TILES:
        for splits in (1, 2, 4, 8):
            for depth in (128, 256):
                for stages in (3, 4, 6, 8):
                    for warps in {4, tall // 16}:
                        one = Tiling(tall, wide, splits, depth, stages, warps)
                        blocks, rest = divmod(inputs, splits * depth)
                        if one == chosen or rest or blocks < 2 or stages > blocks + 1 or (tall > 64 and rows <= 64):
                            continue
                        if stages * (tall + wide) * depth <= SHARED_MEMORY and 44 <= one.programs(rows, outputs) <= 396:
                            yield one


def compile_all(tiles: set[Tiling], processes: int) -> None:
    """Into Triton's cache on disk, so that the measuring process only loads; what parts do not change is compiled once."""
    distinct = {tile._replace(splits=min(tile.splits, 2)): tile for tile in tiles}
    sums = {tile.splits: tile for tile in tiles}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_one, [*distinct.values(), *sums.values()], chunksize=4)


def compile_one(tile: Tiling) -> None:
    run(tile, product(16, 256, 2 * tile.depth * tile.splits))


def product(rows: int, outputs: int, inputs: int) -> Product:
    quantize = REFERENCE_OPS.linear.quantize_fp8
    q, q_scale = quantize(normal(rows, inputs))
    weight, weight_scale = quantize(normal(outputs, inputs) * inputs**-0.5)
    assert q.dtype == FP8
    return q, q_scale, weight, weight_scale


def run(tile: Tiling, inputs: Product) -> Tensor:
    """The kernel with a tile of one's own."""
    shape = len(inputs[0]), len(inputs[2])
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    if tile.splits == 1:
        few_rows_scaled_mm(*inputs, None, out, tile, exact=False)
        return out
    _, q_scale, _, weight_scale = inputs
    partial = torch.empty((tile.splits, *shape), device="cuda")
    few_rows_scaled_mm(*inputs, None, partial, tile, exact=False)
    few_rows_scaled_mm_sum(partial, q_scale, weight_scale, None, out)
    return out


def by_torch(inputs: Product) -> Tensor:
    return CUDA_LIKE_OPS.linear.scaled_mm(*inputs, None, torch.bfloat16)


@torch.inference_mode()
def measure(backend: NvidiaBackend, name: str, rows: int, sweep: bool, replays: int) -> Measured:
    """Times torch and the chosen tile, or all; each result is checked first."""
    outputs, inputs = PRODUCTS[name]
    sets = [product(rows, outputs, inputs) for _ in range(max(2, min(MOST_SETS, SPREAD // (outputs * inputs))))]
    reference = REFERENCE_OPS.linear.scaled_mm(*sets[0], None, torch.float32)
    torchs = by_torch(sets[0])

    def us(call: Callable[[Product], Tensor]) -> float:
        return time_of(backend, [lambda _, one=one: call(one) for one in sets], REFERENCE_OPS, replays)

    def timed(tile: Tiling) -> Timed:
        found = run(tile, sets[0])
        error = relative_error([found], [reference])
        if not error <= MOST_ERROR:
            raise SystemExit(f"WRONG: {name} at {rows} rows with {tile} differs from the reference by {error:.3g}")
        return Timed(tile, us(lambda one: run(tile, one)), error, torch.equal(found, torchs))

    chosen, *others = map(timed, candidates(rows, outputs, inputs) if sweep else [tiling(rows, outputs, inputs)])
    return Measured(
        name=name,
        rows=rows,
        weight_bytes=outputs * inputs,
        torch_us=us(by_torch),
        torch_error=relative_error([torchs], [reference]),
        chosen=chosen,
        used=takes(rows, outputs),
        best=sorted(others, key=lambda tile: tile.us)[:SHOWN],
    )


if __name__ == "__main__":
    sys.exit(main())
