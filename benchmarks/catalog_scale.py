"""What a catalog of millions of items costs: first start from Parquet, later starts from the mapped file, memory, look-ups.

Each figure is of a fresh process, so that memory is what a server would hold. The Parquet file and its mapped companion are
made in --work and left there.

    python benchmarks/catalog_scale.py                       # 1.5 and 20 million items; 5 minutes, 5 GB of disk
    python benchmarks/catalog_scale.py --items 1500000       # half a minute
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # "on one core" is meant

import numpy as np
from facts import origin

from polyrec.sid.catalog import MAPPED_FROM

CODEBOOKS = (8192, 8192, 8192)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[1_500_000, 20_000_000])
    parser.add_argument("--work", type=Path, help="folder for the catalogs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)  # what a fresh process does
    args = parser.parse_args()
    if min(args.items) < MAPPED_FROM:
        parser.error(f"catalogs of fewer than {MAPPED_FROM:,} items are not mapped, so there is nothing to measure")
    if args.part:
        print(json.dumps(PARTS[args.part](args.work / "catalog.parquet", args.items[0])))
        return 0
    facts = origin("catalog_scale.py", packages=("numpy", "polars"))
    with tempfile.TemporaryDirectory() as temporary:
        results = [measure(num, (args.work or Path(temporary)) / str(num)) for num in args.items]
    print(render(results))
    if args.out:
        args.out.write_text(json.dumps({"origin": facts, "catalogs": results}, indent=2) + "\n", encoding="utf-8")
    first = results[0]
    missed = first["mapped_load_seconds"] > 2.0 or any(one["trie_sids_per_second"] < 2e6 for one in results)
    return int(missed)


def measure(num: int, work: Path) -> dict[str, Any]:
    """Every part of one size, each in a fresh process."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "catalog.trie").unlink(missing_ok=True)
    found: dict[str, Any] = {"items": num}
    for part in PARTS:
        print(f"{num:,} items: {part} …", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--part", part, "--work", str(work), "--items", str(num)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found |= json.loads(done.stdout)
    for suffix in ("parquet", "trie"):
        found[f"{suffix}_file_bytes"] = (work / f"catalog.{suffix}").stat().st_size
    return found


def make(path: Path, num: int) -> dict[str, Any]:
    """A catalog of random SIDs, unless it is there."""
    from polyrec.bench.make_model import random_catalog

    if not path.is_file():
        random_catalog(CODEBOOKS, num, seed=0).save(path)
    return {}


def trie(path: Path, num: int) -> dict[str, Any]:
    """Parquet -> trie: the SID column read, its SIDs sorted, the arrays built."""
    import polars as pl

    from polyrec.sid.trie import build_trie

    start = time.perf_counter()
    column = pl.read_parquet(path, columns=["sid"])["sid"]
    codes = column.explode().to_numpy().reshape(len(column), len(CODEBOOKS))
    read = time.perf_counter()
    built = build_trie(codes)
    end = time.perf_counter()
    arrays = (built.first_child, built.code, built.level_starts, built.rows)
    return {
        "trie_seconds": end - start,
        "trie_build_seconds": end - read,
        "trie_sids_per_second": num / (end - start),
        "trie_nodes": built.num_nodes,
        "trie_bytes": sum(array.nbytes for array in arrays),
    }


def first_load(path: Path, num: int) -> dict[str, Any]:
    """From Parquet with all checks, the mapped file written."""
    from polyrec.sid.catalog import Catalog

    start = time.perf_counter()
    catalog = Catalog.load(path)
    assert len(catalog) == num
    return {"first_load_seconds": time.perf_counter() - start, "first_load_peak_bytes": peak_bytes()}


def later_load(path: Path, num: int) -> dict[str, Any]:
    """From the mapped file, and then everything that a server's start and requests read."""
    from polyrec.sid.catalog import Catalog
    from polyrec.sid.trie import dead_nodes, leaves_of_rows, live_nodes

    Catalog  # noqa: B018 (imported above, so that the clock leaves it out)
    before = resident()
    start = time.perf_counter()
    catalog = Catalog.load(path)
    loaded = time.perf_counter()
    leaves = leaves_of_rows(catalog.trie)
    catalog.codes.min(axis=0), catalog.codes.max(axis=0)
    catalog.trie.first_child.astype(np.int64), catalog.trie.code.astype(np.int64)  # what goes to a device
    ready = time.perf_counter()
    rng = np.random.default_rng(1)
    rows = rng.integers(0, num, 500).tolist()
    ids = [catalog.item_ids[row] for row in rows]
    sids = catalog.codes[rows].tolist()
    lists = rng.permutation(num)[: num // 3]
    found = {
        "mapped_load_seconds": loaded - start,
        "server_ready_seconds": ready - start,
        "ids_500_us": timed(lambda: catalog.rows(ids)) * 1e6,
        "sids_500_us": timed(lambda: [catalog.row_of_codes(sid) for sid in sids]) * 1e6,
        "names_500_us": timed(lambda: [catalog.names[row] for row in rows]) * 1e6,
        "allow_third_ms": timed(lambda: live_nodes(catalog.trie, leaves[lists])) * 1e3,
        "exclude_third_ms": timed(lambda: dead_nodes(catalog.trie, leaves[lists])) * 1e3,
        "exclude_50_ms": timed(lambda: dead_nodes(catalog.trie, leaves[lists[:50]])) * 1e3,
    }
    assert catalog.rows(ids).tolist() == rows
    assert [catalog.row_of_codes(sid) for sid in sids] == rows
    return {**found, "resident_bytes": resident() - before}


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    part.__name__: part for part in (make, trie, first_load, later_load)
}


def timed(call: Callable[[], object]) -> float:
    """Seconds of the second of two calls: the first touches the pages."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident() -> int:
    """Bytes of this process in memory, mapped pages that it touched included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that this process had in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def render(results: list[dict[str, Any]]) -> str:
    """The figures, as Markdown: a column a size."""
    fields = [field for field in results[0] if field != "items"]
    lines = [
        "| | " + " | ".join(f"{one['items']:,} items" for one in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for field in fields:
        cells = [f"{one[field] / 1e6:,.1f} M" if one[field] > 1e6 else f"{one[field]:,.4g}" for one in results]
        lines.append(f"| {field.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
