"""The least work of a search, in floating-point operations and bytes, and the time that a device's ceilings allow for it.

Counted: every product of the model, attention's products, the head; weights read once a phase, keys and values written once,
the prompt's read once a pass and request. Of a prefill, the last layer's attention and what follows it count for each prompt's
last row alone, as long prefills compute them. Activations are not counted: a perfect engine keeps them on the chip.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..hardware.base.backend import HardwareBackend
from ..hardware.base.runtime import Runtime
from ..models.spec import Decoder
from ..sid.layout import SidLayout


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: products of the model's dtype and of e4m3 in TFLOP/s, copies in TB/s (read and written)."""

    tflops: float
    fp8_tflops: float
    tb_per_s: float


@dataclass(frozen=True)
class Phase:
    """name; rows: tokens that pass through the model; flops, of e4m3 products apart, and bytes, at least."""

    name: str
    rows: int
    flops: float
    fp8_flops: float
    bytes: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The larger of the times that arithmetic and traffic take."""
        arithmetic = self.flops / ceilings.tflops + self.fp8_flops / ceilings.fp8_tflops
        return max(arithmetic, self.bytes / ceilings.tb_per_s) / 1e12


def phases(model: Decoder, layout: SidLayout, tokens: int, n: int, batch: int) -> list[Phase]:
    """Prefill with the first level, then a pass for each further level, of `batch` requests of `tokens` tokens and n beams.

    A product's weights count with the bytes that they have in this model, so quantised ones count as such.
    """
    config, depth = model.config, layout.depth
    head = model.head_weight
    matrices = {
        weight.data_ptr(): weight
        for weight in [*model.parameters(), *model.buffers()]
        if weight.dim() == 2 and weight.data_ptr() not in {head.data_ptr(), model.embed_tokens.weight.data_ptr()}
    }
    products = [weight for weight in matrices.values() if min(weight.shape) > 1]  # not a quantised one's scales
    ends = {weight.data_ptr() for module in model.after_attention for weight in module.parameters()}
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in matrices.values())
    num_layers = config.num_hidden_layers
    pair = 4 * config.num_attention_heads * config.head_dim  # flops a query and key of a layer
    kv = 2 * config.num_key_value_heads * config.head_dim * num_layers * head.element_size()

    def product_work(rows: int, end_rows: int) -> tuple[float, float]:
        """Flops of the model's products, those of e4m3 ones apart. end_rows: of products after the last layer's attention."""
        plain = fp8 = 0.0
        for weight in products:
            flops = 2.0 * weight.numel() * (end_rows if weight.data_ptr() in ends else rows)
            plain, fp8 = (plain, fp8 + flops) if weight.element_size() == 1 else (plain + flops, fp8)
        return plain, fp8

    def head_work(level: int, rows: int) -> tuple[float, float]:
        size = layout.codebook_sizes[level] * config.hidden_size
        return 2.0 * size * rows, float(size * head.element_size())

    plain, fp8 = product_work(batch * tokens, batch)
    flops, read = head_work(0, batch)
    found = [
        Phase(
            "prefill",
            batch * tokens,
            plain + pair * batch * ((num_layers - 1) * tokens * (tokens + 1) / 2 + tokens) + flops,
            fp8,
            weight_bytes + kv * batch * tokens + read,
        )
    ]
    for level in range(1, depth):
        rows = batch * n
        plain, fp8 = product_work(rows, rows)
        flops, read = head_work(level, rows)
        found.append(
            Phase(
                f"pass {level}",
                rows,
                plain + pair * num_layers * rows * (tokens + level) + flops,
                fp8,
                weight_bytes + kv * batch * (tokens + n * (level - 1)) + read,
            )
        )
    return found


def measure_ceilings(backend: HardwareBackend, model: Decoder, *, size: int = 8192, repeats: int = 10) -> Ceilings:
    """Medians of large products in the model's dtype, and in e4m3 if it has such weights (else the same number), and of a
    large copy; random data, which no shortcut makes fast."""
    runtime, linear, dtype = backend.runtime, backend.ops.linear, model.head_weight.dtype
    left, right = (torch.randn(size, size, device=runtime.device).to(dtype) for _ in range(2))
    plain = fp8 = _seconds(runtime, lambda: left @ right, repeats)
    if any(weight.element_size() == 1 for weight in model.parameters()):
        (values, scale), (weight, weight_scale) = linear.quantize_fp8(left), linear.quantize_fp8(right)
        fp8 = _seconds(runtime, lambda: linear.scaled_mm(values, scale, weight, weight_scale, None, dtype), repeats)
    source = torch.randn(size * size * 4, device=runtime.device)
    target = torch.empty_like(source)
    copy = _seconds(runtime, lambda: target.copy_(source), repeats)
    flops = 2 * size**3 / 1e12
    return Ceilings(flops / plain, flops / fp8, 2 * source.numel() * source.element_size() / copy / 1e12)


def _seconds(runtime: Runtime, call: Callable[[], object], repeats: int) -> float:
    found = []
    for number in range(repeats + 3):
        runtime.synchronize()
        start = time.perf_counter()
        call()
        runtime.synchronize()
        if number >= 3:
            found.append(time.perf_counter() - start)
    return statistics.median(found)
