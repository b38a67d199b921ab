"""Our training step on a GPU beside Hugging Face's Qwen3 of the same shape: tokens a second, memory, time to the first step.

Both sides: random weights, 16 x 1,024 random tokens, 16 x 1,023 labels under the whole vocabulary, AdamW, weights in bf16.
Hugging Face's side keeps nothing but bf16 (weights and moments), as its users' scripts do when they call .to(bfloat16); ours
keeps every weight's fp32 value and fp32 second moments, clips the gradient and reads loss and norm back. Ours is also run
with the head that training uses by default, where a code is predicted among its level's 8,192 codes.

Tokens a second are what a loop gives: after the warm-up all steps run one after another, and are timed together, from
synchronised to synchronised device. In between the host waits for nothing but what a side's own step waits for: ours for loss
and norm, Hugging Face's for nothing. A second figure is the median of a few further steps, each from synchronised to
synchronised device, which then has nothing to do until a step's first kernels are launched. Results without `synchronised`
have that figure as their tokens a second.

    python benchmarks/train_gpu.py                        # eager Hugging Face and ours, about a minute on an H200
    python benchmarks/train_gpu.py --forms fused compiled --heads vocab --baseline --profile 24   # layers' forms, by kernel
    python benchmarks/train_gpu.py --baseline eager compiled --out benchmarks/results/train_gpu_h200.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from facts import origin

from polyrec.data.loader import ExampleLoader
from polyrec.data.packing import LevelLabels, PackedBatch
from polyrec.hardware import get_hardware_backend
from polyrec.hardware.base.backend import HardwareBackend
from polyrec.hardware.base.config import HardwareConfig
from polyrec.models.checkpoint import build_model
from polyrec.models.qwen3 import SPEC
from polyrec.sid.layout import SidLayout
from polyrec.training.accelerate import LayerForm, num_parameters, prepare_layers
from polyrec.training.objective import Head, Objective
from polyrec.training.recipe import OptimConfig, size_fields
from polyrec.training.trainer import Trainer

VOCAB, CODES, LEVELS = 176_256, 8192, 3
Step = Callable[[], float | torch.Tensor]  # -> the loss; on the device, where nobody has waited for it


@dataclass(frozen=True)
class Measured:
    """One side. tokens_per_second: of all counted steps together. synchronised: the same by the median of further steps, each
    from synchronised to synchronised device. gib: most memory in tensors, of which gib_before were there before the side was
    built: what an earlier side left. model_flops_share: of the device's bf16 peak, at tokens_per_second. seconds: of the host,
    from each counted step's return to the next one's."""

    name: str
    tokens_per_second: int
    synchronised: int
    gib: float
    gib_before: float
    first_step_seconds: float
    model_flops_share: float
    loss: float
    seconds: tuple[float, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.7b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16, help="steps that count")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--synchronised", type=int, default=3, help="steps after them, each waited for")
    parser.add_argument("--baseline", nargs="*", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--heads", nargs="*", default=["vocab", "level"], choices=["vocab", "level"])
    parser.add_argument(
        "--forms", nargs="*", default=["fused"], choices=["plain", "fused", "compiled"], help="of our layers"
    )
    parser.add_argument("--checkpointed", type=int, default=0, help="layers that run again in the backward pass")
    parser.add_argument(
        "--profile", type=int, default=0, help="so many of one step's kernels, the longest, of each side"
    )
    parser.add_argument("--peak", type=float, default=790, help="TFLOP/s of bf16 products on this device")
    parser.add_argument("--out", type=Path, help="JSON with all figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a device that torch shows as cuda, and there is none.", file=sys.stderr)
        return 1
    facts = origin("train_gpu.py", packages=("torch", "transformers"))
    backend = get_hardware_backend(HardwareConfig(purpose="train"))
    facts["machine"]["device"] = backend.runtime.device_name()
    print(f"{args.size}, {args.rows} x {args.length} tokens")
    print(f"{'':32}{'tokens/s':>10}{'synced':>10}{'GiB':>8}{'first s':>9}{'MFU':>7}")
    found = []
    # Ours first: what the baseline leaves in the process cannot help it.
    sides: list[tuple[str, Callable[[], Step]]] = [
        (f"polyrec, {head} head, {form}", lambda head=head, form=form: our_step(args, backend, head, form))
        for form in args.forms
        for head in args.heads
    ]
    sides += [(f"transformers, {mode}", lambda mode=mode: baseline_step(args, mode)) for mode in args.baseline]
    for name, make in sides:
        found.append(measure(name, make, args))
        one = found[-1]
        rates = f"{one.tokens_per_second:10,}{one.synchronised:10,}"
        print(f"{name:32}{rates}{one.gib:8.1f}{one.first_step_seconds:9.1f}{one.model_flops_share:7.1%}", flush=True)
    if args.out:
        shape = {"size": args.size, "rows": args.rows, "length": args.length, "checkpointed": args.checkpointed}
        result = {"origin": facts, "shape": shape, "measured": [asdict(one) for one in found]}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(name: str, make: Callable[[], Step], args: argparse.Namespace) -> Measured:
    before = torch.cuda.memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    step = make()
    warm_up = [waited(step) for _ in range(args.warm_up)]
    seconds, loss = in_a_row(step, args.steps)
    each = sum(seconds) / args.steps
    apart = statistics.median(waited(step) for _ in range(args.synchronised))
    tokens = args.rows * args.length
    peak = torch.cuda.max_memory_allocated() / 2**30
    if args.profile:
        print_kernels(step, args.profile)
    share = flops(args, "level" if "level" in name else "vocab") / each / args.peak / 1e12
    del step
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return Measured(
        name,
        tokens_per_second=round(tokens / each),
        synchronised=round(tokens / apart),
        gib=round(peak, 2),
        gib_before=round(before, 2),
        first_step_seconds=round(warm_up[0], 2),
        model_flops_share=share,
        loss=loss,
        seconds=seconds,
    )


def waited(step: Step) -> float:
    """Seconds of one step, from synchronised to synchronised device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_a_row(step: Step, count: int) -> tuple[tuple[float, ...], float]:
    """So many steps from synchronised to synchronised device -> seconds from return to return, the last one's until the device
    is done; the last loss."""
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(count):
        loss = step()
        times.append(time.perf_counter())
    torch.cuda.synchronize()
    times[-1] = time.perf_counter()
    return tuple(after - before for before, after in pairwise(times)), float(loss)


def print_kernels(step: Step, most: int) -> None:
    """Milliseconds of one more step by kernel, the longest first, and by family."""
    from polyrec.bench.kernels import family_of, kernels_of  # the engine's dependencies, which training does not need

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = sorted(kernels_of(profiler.events()), key=lambda kernel: -kernel.microseconds)
    families: Counter[str] = Counter()
    for kernel in kernels:
        families[family_of(kernel.name)] += kernel.microseconds
    print(f"    {sum(families.values()) / 1e3:8.2f} ms on the device: ", end="")
    print(", ".join(f"{family} {microseconds / 1e3:.1f}" for family, microseconds in families.most_common()))
    for kernel in kernels[:most]:
        print(f"    {kernel.microseconds / 1e3:8.2f} ms {kernel.calls:5} x {kernel.name[:110]}", flush=True)


def flops(args: argparse.Namespace, head: Head) -> float:
    """Of forward and backward pass, nothing computed twice; half of a square of scores is masked."""
    sizes = size_fields(args.size)
    heads, inner = sizes["num_attention_heads"] * sizes["head_dim"], sizes["intermediate_size"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    per_layer = sizes["hidden_size"] * (2 * heads + 2 * kv + 3 * inner)
    rows = CODES if head == "level" else VOCAB
    weights = sizes["num_hidden_layers"] * per_layer + rows * sizes["hidden_size"]
    scores = sizes["num_hidden_layers"] * heads * args.length
    return float(args.rows * args.length * 6 * (weights + scores))


def our_step(args: argparse.Namespace, backend: HardwareBackend, head: Head, form: LayerForm) -> Step:
    """The trainer's own step, over one batch."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "tie_word_embeddings": True, "rope_theta": 1e6,
        "max_position_embeddings": 40_960, **size_fields(args.size),
    }  # fmt: skip
    model = build_model(SPEC, values, backend, torch.bfloat16)
    model.init_weights(torch.Generator(device=backend.runtime.device).manual_seed(0))
    layout = SidLayout.contiguous((CODES,) * LEVELS, VOCAB - CODES * LEVELS - 2)
    objective = Objective(layout, head, backend, model.attention_needs(torch.bfloat16, train=True))
    batch = random_batch(args.rows, args.length)
    loader = cast(ExampleLoader, SimpleNamespace(batch=lambda step: batch))
    config = OptimConfig(learning_rate=1e-4, warmup_steps=0, ema_decay=0)
    steps = args.warm_up + args.steps + args.synchronised + bool(args.profile)
    trainer = Trainer(model.train(), loader, objective, config, steps, ops=backend.ops, compiled=True)
    prepare_layers(model, form, checkpointed=args.checkpointed)
    assert num_parameters(model) > 1e8
    return lambda: trainer.train_step().loss


def random_batch(rows: int, length: int) -> PackedBatch:
    """Every position but each row's last predicts a code, of the levels in turn."""
    rng = np.random.default_rng(0)
    tokens = rows * length
    position = np.tile(np.arange(length), rows)
    predicts = np.flatnonzero(position < length - 1)
    labels = tuple(
        LevelLabels(index, rng.integers(0, CODES, len(index)), np.ones(len(index), np.float32))
        for index in (predicts[level::LEVELS] for level in range(LEVELS))
    )
    nothing = np.zeros(tokens, np.int64)
    return PackedBatch(rng.integers(0, VOCAB, tokens), position, nothing, np.full(rows, length), labels)


def baseline_step(args: argparse.Namespace, mode: str) -> Step:
    """Hugging Face's model as `.to(bfloat16)` gives it, its own loss, which nobody reads, and torch's fused AdamW."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **size_fields(args.size), vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=40_960,
        rope_theta=1e6, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if mode == "compiled" else model
    tokens = torch.randint(0, VOCAB, (args.rows, args.length), device="cuda")
    torch.cuda.reset_peak_memory_stats()  # it was built in fp32

    def step() -> torch.Tensor:
        loss: torch.Tensor = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    raise SystemExit(main())
