"""Makes events.csv and items.csv, a small made-up outdoor shop: `python make_shop.py` writes them beside this file.

Each customer has one or two hobbies. An order holds a few products, mostly of one hobby, and a hobby's products are bought
in a usual order (a tent before its pegs), so that there is something to learn. The same file always comes out.
"""

from __future__ import annotations

import csv
import random
from datetime import datetime, timedelta
from pathlib import Path

HOBBIES = {
    "camping": "Tent|Tent Pegs|Sleeping Bag|Sleeping Mat|Camp Stove|Gas Cartridge|Cooking Pot|Lantern|Folding Chair|Cooler",
    "hiking": "Boots|Wool Socks|Rucksack|Trekking Poles|Rain Jacket|Map Case|Compass|Water Bottle|Gaiters|Blister Kit",
    "climbing": "Harness|Rope|Carabiner Set|Climbing Shoes|Chalk Bag|Helmet|Belay Device|Quickdraws|Crash Pad|Finger Tape",
    "cycling": "Road Bike|Bike Helmet|Bottle Cage|Pump|Inner Tube|Multi Tool|Rear Light|Bike Lock|Gloves|Chain Oil",
    "kayaking": "Kayak|Paddle|Life Vest|Dry Bag|Spray Deck|Neoprene Boots|Bilge Pump|Roof Rack|Throw Line|Paddle Float",
    "running": "Running Shoes|Running Socks|Shorts|Sports Watch|Head Torch|Waist Belt|Energy Gel|Foam Roller|Cap|Vest",
}
MAKES = ("Alder", "Birch", "Cedar")
START = datetime(2024, 1, 2)


def products() -> list[dict[str, str]]:
    """Thing by thing, each from every make: P001 … P180."""
    rows = []
    for hobby, things in HOBBIES.items():
        for thing in things.split("|"):
            for make in MAKES:
                rows.append({"product_id": f"P{len(rows) + 1:03d}", "title": f"{make} {thing}", "category": hobby})
    return rows


def orders(rng: random.Random, num_customers: int = 320) -> list[dict[str, str]]:
    """Rows of events.csv, by time."""
    rows = []
    hobbies = list(HOBBIES)
    for customer in range(1, num_customers + 1):
        own = rng.sample(hobbies, rng.choice((1, 1, 2)))
        make = rng.randrange(len(MAKES))  # most customers stay with a make
        reached = dict.fromkeys(own, 0)
        day = START + timedelta(days=rng.randrange(200))
        for _ in range(rng.randint(2, 6)):
            hobby = rng.choice(own)
            at = day + timedelta(minutes=rng.randrange(9 * 60, 20 * 60))
            for thing in range(reached[hobby], reached[hobby] + rng.randint(1, 3)):
                chosen = make if rng.random() < 0.8 else rng.randrange(len(MAKES))
                number = hobbies.index(hobby) * 30 + thing % 10 * 3 + chosen + 1
                rows.append((at, customer, f"P{number:03d}"))
            reached[hobby] = (thing + 1) % 10
            day += timedelta(days=rng.randint(3, 45))
    rows.sort()
    order_ids = {key: 50_001 + number for number, key in enumerate(sorted({row[:2] for row in rows}))}
    return [
        {
            "customer_id": f"C{customer:04d}",
            "order_id": str(order_ids[at, customer]),
            "product_id": product,
            "ordered_at": f"{at:%Y-%m-%d %H:%M}",
        }
        for at, customer, product in rows
    ]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """One CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(folder: Path) -> None:
    """Both files, always the same."""
    write(folder / "items.csv", products())
    write(folder / "events.csv", orders(random.Random(7)))


if __name__ == "__main__":
    main(Path(__file__).parent)
