"""The least work of a search, in floating-point operations and bytes, and the time that a device's ceilings allow for it.

Counted: every product of the model, attention's products, the head; weights read once a phase, keys and values written once,
the prompt's read once a pass and request. Activations are not: a perfect engine keeps them on the chip.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..hardware.base.runtime import Runtime
from ..models.spec import Decoder
from ..sid.layout import SidLayout


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: products in TFLOP/s, copies in TB/s (bytes read and written)."""

    tflops: float
    tb_per_s: float


@dataclass(frozen=True)
class Phase:
    """name; rows: tokens that pass through the model; flops and bytes at least."""

    name: str
    rows: int
    flops: float
    bytes: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The larger of the two times."""
        return max(self.flops / (ceilings.tflops * 1e12), self.bytes / (ceilings.tb_per_s * 1e12))


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
    elements = sum(weight.numel() for weight in matrices.values() if min(weight.shape) > 1)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in matrices.values())
    pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers  # flops a query and key
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * head.element_size()

    def head_work(level: int, rows: int) -> tuple[float, float]:
        size = layout.codebook_sizes[level] * config.hidden_size
        return 2.0 * size * rows, float(size * head.element_size())

    flops, read = head_work(0, batch)
    found = [
        Phase(
            "prefill",
            batch * tokens,
            2.0 * elements * batch * tokens + pair * batch * tokens * (tokens + 1) / 2 + flops,
            weight_bytes + kv * batch * tokens + read,
        )
    ]
    for level in range(1, depth):
        rows = batch * n
        flops, read = head_work(level, rows)
        found.append(
            Phase(
                f"pass {level}",
                rows,
                2.0 * elements * rows + pair * rows * (tokens + level) + flops,
                weight_bytes + kv * batch * (tokens + n * (level - 1)) + read,
            )
        )
    return found


def measure_ceilings(runtime: Runtime, dtype: torch.dtype, *, size: int = 8192, repeats: int = 10) -> Ceilings:
    """Medians of a large product in `dtype` and of a large copy on this device; random data, which no shortcut makes fast."""
    left, right = (torch.randn(size, size, device=runtime.device).to(dtype) for _ in range(2))
    product = _seconds(runtime, lambda: left @ right, repeats)
    source = torch.randn(size * size * 4, device=runtime.device)
    target = torch.empty_like(source)
    copy = _seconds(runtime, lambda: target.copy_(source), repeats)
    return Ceilings(2 * size**3 / product / 1e12, 2 * source.numel() * 4 / copy / 1e12)


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
