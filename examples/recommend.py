"""Recommend from Python: one history, many at once, and filters. `python examples/recommend.py MODEL_FOLDER`

Any folder written by `polyrec train` will do, such as the demo's or the one of docs/your-data.md.
"""

from __future__ import annotations

import sys

from polyrec import Recommender
from polyrec.core.request import Recommendation, RecommendRequest


def show(title: str, answer: Recommendation) -> None:
    """One answer as a few lines."""
    print(f"{title} ({answer.source}, rule {answer.score_rule})")
    for rank, item in enumerate(answer.items, 1):
        print(f"  {rank}. {item.item_id:<10} {item.score:>8.3f}  {item.sid}  {item.name or ''}")


def main(folder: str) -> None:
    """Three questions to one model."""
    recommender = Recommender.from_pretrained(folder)
    first, second, third = recommender.catalog.item_ids[:3]

    # A list inside the history is a basket: its items have no order among themselves.
    show("One history", recommender.recommend([[first, second], third], n=5, exclude_seen=True))

    # Many histories share the engine's batches; each may ask for its own n and filters.
    requests = [
        RecommendRequest(history=[first], n=3),
        RecommendRequest(history=[second, third], n=3, exclude=[first]),
        RecommendRequest(history=[third], n=2, allow=[first, second]),
        RecommendRequest(history=["an item nobody knows"], n=2),  # answered by popularity, and says so
    ]
    for request, answer in zip(requests, recommender.recommend_batch(requests), strict=True):
        show(f"History {list(request.history)}", answer)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
