"""What the Triton kernels reach on a device: time, bytes a second and their share of a plain copy's, beside torch's own form.

A call's bytes are each input read once and each result written once. Each time is the median over replays of a graph that
holds one call for each of several sets of inputs, together larger than the L2 cache where the rows are many; where they are
few, the inputs stay in L2, as they do between the layers of a model. A graph's launch gaps are part of the time.

    python benchmarks/kernels.py                          # a table, about a minute on an H200
    python benchmarks/kernels.py --only rms silu --rows 64 --warps 2
    python benchmarks/kernels.py --out benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from facts import origin
from torch import Tensor

from polyrec.hardware.backends.cuda_like import NvidiaBackend, cuda_like_ops
from polyrec.hardware.backends.cuda_like.kernels.norm_backward import rms_norm_backward
from polyrec.hardware.backends.cuda_like.kernels.rotary_backward import rotate_backward
from polyrec.hardware.backends.cuda_like.kernels.swiglu_backward import silu_and_mul_backward
from polyrec.hardware.backends.cuda_like.kernels.total_norm import chunk_table, squares
from polyrec.hardware.ops import REFERENCE_OPS, PlatformOps

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2048, 6144, 16, 8, 128, 16
PRODUCTS = {"qkv": (4096, 2048), "out": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)}  # outputs, inputs
FP8 = torch.float8_e4m3fn
SPREAD = 256 * 1024**2  # bytes over which the inputs of one graph lie
MOST_SETS = 32
# The most that ‖found − reference‖ / ‖reference‖ may be: of bf16 results; of e4m3 ones, where values between two numbers go
# either way, since torch's form rounds to bf16 on the way; of products of e4m3 against bf16's own.
BF16_ERROR, E4M3_ERROR, PRODUCT_ERROR = 0.01, 0.04, 0.08

Call = Callable[[PlatformOps], Any]


@dataclass(frozen=True)
class Measured:
    """name and rows; bytes of a call; flops of a product; microseconds of the kernel and of torch's form; relative error, and
    the most that it may be."""

    name: str
    rows: int
    bytes: int
    flops: int
    kernel_us: float
    torch_us: float
    error: float
    limit: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 2455, 20000])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--warps", type=float, default=1, help="times the warps that each launch chooses: 0.5, 2")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--ceiling", type=float, default=4.27, help="TB/s of a large copy on this device")
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a device that torch shows as cuda, and there is none.", file=sys.stderr)
        return 1
    if args.warps != 1:
        scale_warps(args.warps)
    facts = origin("kernels.py", packages=("torch",))
    backend = NvidiaBackend()
    backend.runtime.select(0)
    facts["machine"] |= {"device": backend.runtime.device_name(), "triton": triton.__version__}
    print(f"{'operation':28}{'rows':>7}{'MB':>9}{'kernel us':>11}{'TB/s':>7}{'share':>7}{'torch us':>10}{'ratio':>7}")
    found = []
    for rows in args.rows:
        for name, make in operations(rows):
            if args.only and not any(part in name for part in args.only):
                continue
            one = measure(backend, name, rows, make, args.replays)
            found.append(one)
            print(line(one, args.ceiling), flush=True)
    wrong = [one for one in found if not one.error <= one.limit]
    for one in wrong:
        print(f"WRONG: {one.name} at {one.rows} rows differs from the reference by {one.error:.3g}")
    if args.out:
        result = {"origin": facts, "ceiling_tb_s": args.ceiling, "operations": [asdict(one) for one in found]}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return bool(wrong)


def scale_warps(factor: float) -> None:
    """For choosing the launches' constants: every kernel of this process gets that many times its warps, from 1 to 32."""
    launch = triton.JITFunction.run

    def scaled(self: Any, *args: Any, num_warps: int = 4, **options: Any) -> Any:
        return launch(self, *args, num_warps=min(max(int(num_warps * factor), 1), 32), **options)

    triton.JITFunction.run = scaled


def line(one: Measured, ceiling: float) -> str:
    """A product's rate is in TFLOP/s, and has no share of a copy's."""
    rate = one.bytes / one.kernel_us / 1e6
    kind = (
        f"{rate:7.2f}{rate / ceiling:7.0%}" if not one.flops else f"{one.flops / one.kernel_us / 1e6:7.0f}{'TF/s':>7}"
    )
    return (
        f"{one.name:28}{one.rows:7}{one.bytes / 1e6:9.1f}{one.kernel_us:11.2f}{kind}"
        f"{one.torch_us:10.2f}{one.torch_us / one.kernel_us:7.1f}"
    )


def operations(rows: int) -> Iterator[tuple[str, Callable[[], tuple[Call, Any, int, int]]]]:
    """Name -> what draws new inputs: the call, its inputs, their bytes where not each is read whole (else 0), and its flops."""

    def plain(call: Callable[..., Any], *inputs: Any) -> tuple[Call, Any, int, int]:
        return lambda ops: call(ops, *inputs), inputs, 0, 0

    def hidden() -> Tensor:
        return normal(rows, HIDDEN)

    yield "rms_norm", lambda: plain(lambda o, x, w: o.norm.rms_norm(x, w, 1e-6), hidden(), normal(HIDDEN))
    yield (
        "add_rms_norm",
        lambda: plain(lambda o, x, r, w: o.norm.add_rms_norm(x, r, w, 1e-6), hidden(), hidden(), normal(HIDDEN)),
    )
    yield "rms_norm_fp8", lambda: plain(lambda o, x, w: o.norm.rms_norm_fp8(x, w, 1e-6), hidden(), normal(HIDDEN))
    yield (
        "add_rms_norm_fp8",
        lambda: plain(lambda o, x, r, w: o.norm.add_rms_norm_fp8(x, r, w, 1e-6), hidden(), hidden(), normal(HIDDEN)),
    )
    yield "mm_add_rms_norm_fp8 down", lambda: product_and_norm(rows)
    yield "silu_and_mul", lambda: plain(lambda o, x: o.act.silu_and_mul(x), normal(rows, 2 * INNER))
    yield "silu_and_mul_fp8", lambda: plain(lambda o, x: o.act.silu_and_mul_fp8(x), normal(rows, 2 * INNER))
    yield "quantize_fp8", lambda: plain(lambda o, x: o.linear.quantize_fp8(x), hidden())
    yield "quantize_fp8_blocks", lambda: plain(lambda o, x: o.linear.quantize_fp8_blocks(x), hidden())
    yield "rotary", lambda: rotary(rows, norm=False, cache=None)
    yield "qk_norm_rotary", lambda: rotary(rows, norm=True, cache=None)
    yield "rotary_store", lambda: rotary(rows, norm=False, cache=torch.bfloat16)
    yield "qk_norm_rotary_store", lambda: rotary(rows, norm=True, cache=torch.bfloat16)
    yield "qk_norm_rotary_store e4m3", lambda: rotary(rows, norm=True, cache=FP8)
    yield "silu_and_mul backward", lambda: swiglu_backward(rows)
    yield "add_rms_norm backward", lambda: norm_backward(rows)
    yield "qkv_norm_rotary backward", lambda: rotary_backward(rows)
    yield "total_norm", lambda: norm_of_gradients(rows)
    yield "kv.write", lambda: write(rows)
    yield "kv.copy_pages", lambda: copy_pages(rows)
    for name, (outputs, inputs) in PRODUCTS.items():
        yield f"scaled_mm {name}", lambda o=outputs, i=inputs: product(rows, o, i, blocks=False)
        yield f"block_scaled_mm {name}", lambda o=outputs, i=inputs: product(rows, o, i, blocks=True)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def rotary(rows: int, *, norm: bool, cache: torch.dtype | None) -> tuple[Call, Any, int, int]:
    """On parts of one product. In torch, e4m3 pages are converted after the write into pages of bf16 would have been."""
    product = normal(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).unflatten(1, (-1, HEAD_DIM))
    q, k, v = product.split((HEADS, KV_HEADS, KV_HEADS), 1)
    weights = (normal(HEAD_DIM), normal(HEAD_DIM)) if norm else ()
    cos, sin = (torch.rand(rows, HEAD_DIM // 2, device="cuda") for _ in range(2))
    epsilon = (1e-6,) if norm else ()
    if cache is None:
        name = "qk_norm_rotary" if norm else "rotary"
        moved = size(q, k, cos, sin, *weights, q, k)
        return lambda ops: getattr(ops.rope, name)(q, k, *weights, cos, sin, *epsilon), product, moved, 0
    caches = [torch.zeros(rows, KV_HEADS, HEAD_DIM, device="cuda").to(cache) for _ in range(2)]
    slots = torch.randperm(rows, device="cuda")
    name = "qk_norm_rotary_store" if norm else "rotary_store"

    def call(ops: PlatformOps) -> Any:
        if ops is not REFERENCE_OPS or cache != FP8:
            out = getattr(ops.rope, name)(q, k, v, *weights, cos, sin, *epsilon, *caches, slots)
        else:
            out = ops.rope.qk_norm_rotary(q, k, *weights, cos, sin, *epsilon)
            bytes_of = [part.view(torch.uint8) for part in caches]  # torch copies no e4m3 rows by index
            ops.kv.write(out[1].to(FP8).view(torch.uint8), v.to(FP8).view(torch.uint8), *bytes_of, slots)
        return *out, *caches

    return call, product, size(product, cos, sin, *weights, slots, q, k, *caches), 0


def swiglu_backward(rows: int) -> tuple[Call, Any, int, int]:
    """With the activations again, as fused layers are trained. In torch's column: the same in fp32, operation by operation."""
    x, slope = normal(rows, 2 * INNER), normal(rows, INNER)

    def call(ops: PlatformOps) -> Any:
        if ops is not REFERENCE_OPS:
            x_gradient, again = torch.empty_like(x), torch.empty_like(slope)
            silu_and_mul_backward(x, slope, x_gradient, again)
            return x_gradient, again
        (gate, up), own = x.float().chunk(2, -1), slope.float()
        share = gate.sigmoid()
        silu = gate * share
        gradient = torch.cat((own * up * (share + silu * (1 - share)), own * silu), -1)
        return gradient.to(x.dtype), (silu * up).to(x.dtype)

    return call, (x, slope), size(x, slope, x, slope), 0


def norm_backward(rows: int) -> tuple[Call, Any, int, int]:
    """With the residual stream's gradient and the normed rows again."""
    x, slope, stream, weight = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)

    def call(ops: PlatformOps) -> Any:
        if ops is not REFERENCE_OPS:
            return rms_norm_backward(x, weight, 1e-6, slope, stream, again=True)
        gradient, by_weight, unit = by_hand(x.float(), slope.float(), weight.float())
        return (
            (gradient + stream.float()).to(x.dtype),
            by_weight.sum(0).to(x.dtype),
            (unit * weight.float()).to(x.dtype),
        )

    return call, (x, slope, stream, weight), size(x, slope, stream, weight, x, weight, x), 0


def rotary_backward(rows: int) -> tuple[Call, Any, int, int]:
    """On parts of one product, whose gradient is written whole: that of v is copied."""
    counts = (HEADS, KV_HEADS, KV_HEADS)
    product = normal(rows, sum(counts) * HEAD_DIM).unflatten(1, (-1, HEAD_DIM))
    parts, slopes = product.split(counts, 1)[:2], tuple(normal(rows, count, HEAD_DIM) for count in counts)
    weights = normal(HEAD_DIM), normal(HEAD_DIM)
    cos, sin = (torch.rand(rows, HEAD_DIM // 2, device="cuda") for _ in range(2))

    def call(ops: PlatformOps) -> Any:
        if ops is not REFERENCE_OPS:
            gradient = torch.empty_like(product)
            return gradient, *rotate_backward(*parts, weights, cos, sin, 1e-6, slopes, gradient.split(counts, 1))
        turned = ops.rope.rotary(slopes[0].float(), slopes[1].float(), cos, -sin)
        found = [
            by_hand(part.float(), own, weight.float()) for part, own, weight in zip(parts, turned, weights, strict=True)
        ]
        gradient = torch.cat([*(gradient.to(product.dtype) for gradient, _, _ in found), slopes[2]], 1)
        return gradient, *(by_weight.sum((0, 1)).to(product.dtype) for _, by_weight, _ in found)

    return call, (product, slopes), size(*parts, *slopes, *weights, cos, sin, product, *weights), 0


def norm_of_gradients(rows: int) -> tuple[Call, Any, int, int]:
    """Of four matrices and a layer's norms, without the table and the addresses, which are copies. In torch's column:
    get_total_norm, which rounds it to bf16."""
    shapes = [(rows, HIDDEN)] * 4 + [(HIDDEN,)] * 2 + [(HEAD_DIM,)] * 2
    gradients = [normal(*shape) for shape in shapes]
    addresses = torch.tensor([one.data_ptr() for one in gradients], device="cuda")
    table = chunk_table(tuple(one.numel() for one in gradients)).cuda()

    def call(ops: PlatformOps) -> Any:
        if ops is REFERENCE_OPS:
            return torch.nn.utils.get_total_norm(gradients)
        parts = torch.empty(table.shape[1], device="cuda")
        squares(addresses, table, torch.bfloat16, parts, aligned=True)
        return parts.sum().sqrt()

    return call, gradients, size(*gradients), 0


def by_hand(x: Tensor, slope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm's gradient of x, the terms of its weight's, and x over its root mean square."""
    inverse = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    unit, pulled = x * inverse, slope * weight
    return (pulled - unit * (pulled * unit).mean(-1, keepdim=True)) * inverse, slope * unit, unit


def write(rows: int) -> tuple[Call, Any, int, int]:
    key, value = normal(rows, KV_HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM)
    caches = [torch.zeros_like(key), torch.zeros_like(key)]
    slots = torch.randperm(rows, device="cuda")

    def call(ops: PlatformOps) -> Any:
        ops.kv.write(key, value, *caches, slots)
        return tuple(caches)

    return call, (key, value), size(key, value, slots, *caches), 0


def copy_pages(rows: int) -> tuple[Call, Any, int, int]:
    """Half of as many pages as hold the rows, to the other half: read, staged, read again and written, of which two count."""
    pages = max(rows // PAGE // 2, 1)
    caches = [normal(2 * pages * PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    source, target = torch.randperm(2 * pages, device="cuda").chunk(2)

    def call(ops: PlatformOps) -> Any:
        ops.kv.copy_pages(*caches, source, target, PAGE)
        return tuple(caches)

    return call, caches, size(*caches, source, target), 0


def product(rows: int, outputs: int, inputs: int, *, blocks: bool) -> tuple[Call, Any, int, int]:
    """In torch's column: the bf16 product of the same shape."""
    linear = REFERENCE_OPS.linear
    x, wide = normal(rows, inputs), normal(outputs, inputs) * inputs**-0.5
    q, q_scale = (linear.quantize_fp8_blocks if blocks else linear.quantize_fp8)(x)
    if blocks:
        weight, weight_scale = wide.to(FP8), torch.ones(-(-outputs // 128), inputs // 128, device="cuda")
    else:
        weight, weight_scale = linear.quantize_fp8(wide)

    def call(ops: PlatformOps) -> Tensor:
        if ops is REFERENCE_OPS:
            return linear.mm(x, wide, None)
        if blocks:
            return ops.linear.block_scaled_mm(q, q_scale, weight, weight_scale, torch.bfloat16)
        return ops.linear.scaled_mm(q, q_scale, weight, weight_scale, None, torch.bfloat16)

    moved = size(q, q_scale, weight, weight_scale) + 2 * rows * outputs
    return call, q, moved, 2 * rows * outputs * inputs


def product_and_norm(rows: int) -> tuple[Call, Any, int, int]:
    """Down's product and the norm after it; in torch's column the bf16 product and the reference's norm."""
    outputs, inputs = PRODUCTS["down"]
    residual, weight = normal(rows, outputs), normal(outputs)
    x, wide = normal(rows, inputs), normal(outputs, inputs) * inputs**-0.5
    linear = REFERENCE_OPS.linear
    arguments = *linear.quantize_fp8(x), *linear.quantize_fp8(wide)

    def call(ops: PlatformOps) -> Any:
        if ops is REFERENCE_OPS:
            return ops.norm.add_rms_norm_fp8(linear.mm(x, wide, None), residual, weight, 1e-6)
        return ops.norm.mm_add_rms_norm_fp8(*arguments, None, residual, weight, 1e-6)

    moved = size(*arguments, residual, weight) + 5 * rows * outputs
    return call, arguments[0], moved, 2 * rows * outputs * inputs


def size(*values: Any) -> int:
    """Bytes of all tensors, of views their own part."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


@torch.inference_mode()
def measure(backend: NvidiaBackend, name: str, rows: int, make: Callable[[], Any], replays: int) -> Measured:
    """Checks one call, then times both forms on the same sets of inputs."""
    kernels = cuda_like_ops(triton=True, fp8=True)
    call, inputs, moved, flops = make()
    result = call(kernels)
    found = [part.clone() for part in parts_of(result)]
    expected = parts_of(call(REFERENCE_OPS))
    moved = moved or size(*inputs, *parts_of(result))
    sets = max(2, min(MOST_SETS, SPREAD // moved))
    calls = [call, *(make()[0] for _ in range(sets - 1))]
    return Measured(
        name=name,
        rows=rows,
        bytes=moved,
        flops=flops,
        kernel_us=time_of(backend, calls, kernels, replays),
        torch_us=time_of(backend, calls, REFERENCE_OPS, replays),
        error=relative_error(found, expected),
        limit=PRODUCT_ERROR if flops else E4M3_ERROR if any(part.dtype == FP8 for part in found) else BF16_ERROR,
    )


def parts_of(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest over the parts; quantised ones are read back with the scales that follow them."""
    error = 0.0
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        scales = [parts[place + 1] for parts in (found, expected) if place + 1 < len(parts)]
        if one.dtype == FP8 and scales and scales[0].dtype == torch.float32:
            one, other = (
                part.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
                for part, scale in zip((one, other), scales, strict=True)
            )
        error = max(error, float((one.float() - other.float()).norm() / other.float().norm()))
    return error


def time_of(backend: NvidiaBackend, calls: list[Call], ops: PlatformOps, replays: int) -> float:
    """Median microseconds of one call."""
    # Results are kept, so that each call of the graph writes memory of its own.
    captured = backend.graph.capture(lambda: [call(ops) for call in calls])
    times = []
    for number in range(replays + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        if number >= 5:
            times.append(begin.elapsed_time(end))
    captured.close()
    return 1000 * statistics.median(times) / len(calls)


if __name__ == "__main__":
    sys.exit(main())
