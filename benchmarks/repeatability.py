"""Whether an answer is the same to the bit: over repeats, over two processes, and in other company in its batch.

The same request is asked alone, again, in a second process, and among others; the table tells for each whether items and
scores are the same bits, and if not, how far apart scores are. Prefixes are not reused, unless --reuse says so.

    python benchmarks/repeatability.py --model /tmp/onerec --quantization fp8 --out repeatability.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from facts import origin

from polyrec.bench.cases import Target
from polyrec.core.request import RecommendRequest
from polyrec.engine.engine import EngineConfig
from polyrec.engine.front import Prepared
from polyrec.engine.recommender import Recommender
from polyrec.engine.searches import SearchRequest, SearchResult
from polyrec.kvcache.options import KVConfig

ASKED = ((490, 50), (60, 50), (60, 512))  # items of the history, n
# Who is in the batch beside it: (requests, items of their histories, n).
COMPANY = ((1, 490, 50), (3, 490, 50), (7, 60, 50), (15, 60, 50), (3, 60, 512), (1, 999, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--reuse", action="store_true", help="reuse prefixes, as a server does")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)  # what the second process prints
    args = parser.parse_args()
    config = EngineConfig(kv=KVConfig(prefix_cache=args.reuse))
    recommender = Recommender.from_pretrained(args.model, config=config, quantization=args.quantization)
    target = Target.read(args.model)
    asked = [searches(recommender, target, 1, items, n, seed=7)[0] for items, n in ASKED]
    alone = [recommender.engine.run([one])[0] for one in asked]
    if args.digests:
        print(json.dumps([digest(one) for one in alone]))
        return
    facts = origin("repeatability.py", packages=("torch", "triton"))
    other = subprocess.run([sys.executable, *sys.argv, "--digests"], check=True, capture_output=True, text=True)
    elsewhere = json.loads(other.stdout.splitlines()[-1])
    rows = []
    for (items, n), one, first, there in zip(ASKED, asked, alone, elsewhere, strict=True):
        name = f"{items} items, n {n}"
        rows.append({"request": name, "how": "a second process", "same": there == digest(first), "apart": None})
        rows.append(compared(name, f"{args.repeats} repeats", first, run_alone(recommender, one, args.repeats)))
        for count, their_items, their_n in COMPANY:
            others = searches(recommender, target, count, their_items, their_n, seed=11)
            found = recommender.engine.run([one, *others])[0]
            rows.append(compared(name, f"beside {count} of {their_items} items, n {their_n}", first, [found]))
    for row in rows:
        apart = "" if row["apart"] is None else f"scores differ by {row['apart']:.1e} at most"
        print(f"{row['request']:24} {row['how']:40} {'the same bits' if row['same'] else 'differs':14} {apart}")
    if args.out:
        args.out.write_text(json.dumps({"origin": facts, "answers": rows}, indent=2) + "\n")


def run_alone(recommender: Recommender, one: SearchRequest, repeats: int) -> list[SearchResult]:
    """The same request again and again."""
    return [recommender.engine.run([one])[0] for _ in range(repeats)]


def compared(name: str, how: str, first: SearchResult, found: list[SearchResult]) -> dict[str, Any]:
    """A row of the table. apart: the largest difference of the scores of items that both have; None: the same bits."""
    if all(digest(one) == digest(first) for one in found):
        return {"request": name, "how": how, "same": True, "apart": None}
    known = dict(zip(first.leaves.tolist(), first.scores.tolist(), strict=True))
    differences = [
        abs(known[leaf] - score)
        for one in found
        for leaf, score in zip(one.leaves.tolist(), one.scores.tolist(), strict=True)
        if leaf in known
    ]
    return {"request": name, "how": how, "same": False, "apart": max(differences, default=float("nan"))}


def searches(recommender: Recommender, target: Target, num: int, items: int, n: int, seed: int) -> list[SearchRequest]:
    """Searches of different random histories."""
    found = [recommender.prepare(RecommendRequest(history=one, n=n)) for one in target.histories(num, items, seed)]
    return [one.search for one in found if isinstance(one, Prepared)]


def digest(result: SearchResult) -> str:
    """Of an answer's bits."""
    return hashlib.sha256(result.leaves.tobytes() + result.scores.tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
