"""What finding, keeping and evicting prompts' pages costs the thread that launches batches. Needs no device, some seconds.

    python benchmarks/prefix_cache.py            # writes benchmarks/results/prefix_cache.json

60,000 pages of 16 tokens are kept, of prompts of 2,455 tokens. A visit is admit, keep and release of one prompt; each figure is
a median, and the 99th percentile, of 500 in microseconds. `deep`: the prompt's beginning was kept in 152 visits, each one page
longer, so that the tree has a node for every page, which is the most that there can be. `host`: pages go to the host's memory
and come back; the model is so small that the copies themselves cost little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from facts import ROOT, origin

from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.kvcache.host_tier import HostTier
from polyrec.kvcache.pool import KVPool
from polyrec.kvcache.prefix import PrefixCache

PAGE_SIZE = 16
NUM_PAGES = 60_000
LENGTH = 2_455
NEW = 15
REPEATS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prefix_cache.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = origin("prefix_cache.py")
    figures = {**on_the_device(), **with_host()}
    for name, figure in figures.items():
        print(f"{name:24} {figure['p50_us']:8.1f} us   p99 {figure['p99_us']:8.1f} us")
    args.out.write_text(json.dumps({**facts, "microseconds": figures}, indent=2) + "\n")


def on_the_device() -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    cache = PrefixCache(NUM_PAGES + 1, PAGE_SIZE)
    full = [random_prompt(rng) for _ in range(NUM_PAGES // (LENGTH // PAGE_SIZE))]
    for prompt in full:
        visit(cache, prompt)
    returning = [grown(rng, full[index % len(full)]) for index in range(REPEATS)]
    deep = random_prompt(rng)
    figures = {
        "returning": timed(lambda prompt: visit(cache, prompt), returning),
        "peek": timed(cache.peek, returning),
        "new, evicting as much": timed(lambda prompt: visit(cache, prompt), [random_prompt(rng) for _ in returning]),
        "1,000 pages evicted": timed(
            lambda prompt: visit(cache, prompt), [rng.integers(0, 8000, 1000 * PAGE_SIZE) for _ in range(50)]
        ),
    }
    for end in range(PAGE_SIZE, LENGTH, PAGE_SIZE):
        visit(cache, deep[: end + 1])
    figures["deep"] = timed(lambda prompt: visit(cache, prompt), [grown(rng, deep) for _ in returning])
    return figures


def with_host() -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    pool = KVPool(1, 4000 * PAGE_SIZE, 1, 4, torch.float16, torch.device("cpu"))
    page_bytes = PAGE_SIZE * pool.bytes_per_token
    # Chunk and staging tensor hold as many pages as they do of a 1.7B model in fp8.
    tier = HostTier(
        pool,
        PAGE_SIZE,
        CpuRuntime(),
        NUM_PAGES * page_bytes,
        chunk_bytes=292 * page_bytes,
        staging_bytes=73 * page_bytes,
    )
    tier.reserve(NUM_PAGES)
    cache = PrefixCache(4000, PAGE_SIZE, tier)
    prompts = [random_prompt(rng) for _ in range(200)]
    for prompt in prompts[:50]:
        visit(cache, prompt)
    return {
        "host, evicting": timed(lambda prompt: visit(cache, prompt), prompts[50:]),
        "host, coming back": timed(lambda prompt: visit(cache, prompt), prompts[:150]),
    }


def visit(cache: PrefixCache, prompt: np.ndarray) -> None:
    held = cache.admit(prompt)
    assert held is not None
    cache.keep(held, prompt)
    cache.release(held)


def random_prompt(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 8000, LENGTH)


def grown(rng: np.random.Generator, prompt: np.ndarray) -> np.ndarray:
    """All but the last tokens of a prompt, and as many new ones."""
    return np.concatenate([prompt[:-NEW], rng.integers(0, 8000, NEW)])


def timed(work: Callable[[np.ndarray], object], prompts: Iterable[np.ndarray]) -> dict[str, float]:
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        work(prompt)
        times.append((time.perf_counter() - start) * 1e6)
    return {"p50_us": round(statistics.median(times), 1), "p99_us": round(float(np.percentile(times, 99)), 1)}


if __name__ == "__main__":
    main()
