"""The catalog's SIDs as a prefix tree in flat arrays (CSR). numpy only; the engine moves the arrays to a device.

Nodes are numbered breadth first and in SID order within a level, so the children of a node are a contiguous range of node
ids, leaf k of the last level is the k-th SID in order, and "lower node id" is "lower SID" at every level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..core.errors import CatalogError

MAX_COMPLETE_LEAVES = 50_000_000  # of a tree of all code sequences: some 2 GB


@dataclass(frozen=True, eq=False)
class Trie:
    """first_child: int64 [inner nodes + 1], children of v are first_child[v] … first_child[v + 1] − 1 (v = 0 is the root).

    code: int32 [nodes], the code on the edge into a node (−1 for the root). parent: int64 [nodes] (−1 for the root).
    level_starts: int64 [S + 2], node ids of level l are level_starts[l] … level_starts[l + 1] − 1; level 0 is the root.
    rows: int64 [leaves], the catalog row of each leaf in SID order.
    """

    first_child: np.ndarray
    code: np.ndarray
    parent: np.ndarray
    level_starts: np.ndarray
    rows: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.level_starts) - 2

    @property
    def num_nodes(self) -> int:
        return len(self.code)

    @property
    def num_leaves(self) -> int:
        return len(self.rows)

    @property
    def first_leaf(self) -> int:
        """Node id of the first leaf."""
        return int(self.level_starts[-2])


def build_trie(codes: np.ndarray) -> Trie:
    """Builds the tree from codes int [N, S], N >= 1, all rows different (a repeated SID is a CatalogError)."""
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.shape[0] == 0 or codes.shape[1] == 0:
        raise CatalogError(
            "catalog_empty", f"A catalog needs at least one SID, got shape {codes.shape}.", "Add items to the catalog."
        )
    num, depth = codes.shape
    order = np.lexsort(codes.T[::-1])
    ranked = codes[order]
    # changed[i, l]: row i differs from row i − 1 in one of the first l + 1 codes, so it opens a node of level l + 1.
    changed = np.ones((num, depth), bool)
    changed[1:] = np.logical_or.accumulate(ranked[1:] != ranked[:-1], axis=1)
    if not changed[:, -1].all():
        first = int(np.flatnonzero(~changed[:, -1])[0])
        raise CatalogError(
            "sid_repeated",
            f"{int((~changed[:, -1]).sum())} items repeat another item's SID, the first is {ranked[first].tolist()}.",
            "Give each item its own SID (`polyrec prepare` does).",
        )
    counts = changed.sum(axis=0)
    level_starts = np.cumsum([0, 1, *counts]).astype(np.int64)
    node = np.zeros((num, depth + 1), np.int64)  # node id of each row's prefix, by length
    node[:, 1:] = level_starts[1:-1] + np.cumsum(changed, axis=0) - 1
    code = np.full(level_starts[-1], -1, np.int32)
    parent = np.full(level_starts[-1], -1, np.int64)
    for level in range(depth):
        opens = changed[:, level]
        code[node[opens, level + 1]] = ranked[opens, level]
        parent[node[opens, level + 1]] = node[opens, level]
    fanout = np.bincount(parent[1:], minlength=int(level_starts[-2]))
    first_child = np.concatenate([[1], 1 + np.cumsum(fanout)]).astype(np.int64)
    return Trie(first_child, code, parent, level_starts, order.astype(np.int64))


def complete_trie(codebook_sizes: tuple[int, ...]) -> Trie:
    """The tree of all code sequences, leaf k being the k-th in order: a search that no catalog constrains. Up to
    MAX_COMPLETE_LEAVES of them."""
    if (leaves := math.prod(codebook_sizes)) > MAX_COMPLETE_LEAVES:  # before numpy, whose product would wrap at 2^63
        raise CatalogError(
            "code_space_too_large",
            f"Codebooks {list(codebook_sizes)} allow {leaves:,} SIDs, more than {MAX_COMPLETE_LEAVES:,}.",
            "Search within the catalog, or use smaller codebooks.",
        )
    counts = np.cumprod([1, *codebook_sizes])
    level_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    fanout = np.repeat(np.array(codebook_sizes, np.int64), counts[:-1])
    code = np.concatenate([[-1], *(np.tile(np.arange(size), counts[lv]) for lv, size in enumerate(codebook_sizes))])
    parent = np.concatenate([[-1], np.repeat(np.arange(level_starts[-2]), fanout)])
    return Trie(
        first_child=np.concatenate([[1], 1 + np.cumsum(fanout)]).astype(np.int64),
        code=code.astype(np.int32),
        parent=parent.astype(np.int64),
        level_starts=level_starts,
        rows=np.arange(counts[-1]),
    )


def leaves_of_rows(trie: Trie) -> np.ndarray:
    """The inverse of `rows`: int64 [catalog rows] -> leaf number."""
    leaves = np.empty(trie.num_leaves, np.int64)
    leaves[trie.rows] = np.arange(trie.num_leaves)
    return leaves


def live_nodes(trie: Trie, leaves: np.ndarray) -> list[np.ndarray]:
    """For levels 1…S the sorted node ids, int64, that lead to any of `leaves` (leaf numbers, int [L]): an allow list's
    own tree."""
    nodes = np.unique(np.asarray(leaves, np.int64)) + trie.first_leaf
    levels = [nodes]
    for _ in range(trie.depth - 1):
        nodes = np.unique(trie.parent[nodes])
        levels.append(nodes)
    return levels[::-1]


def dead_nodes(trie: Trie, leaves: np.ndarray) -> list[np.ndarray]:
    """For levels 1…S the sorted node ids, int64, whose every leaf is in `leaves` (leaf numbers, int [L]): what an exclusion
    takes away."""
    nodes = np.unique(np.asarray(leaves, np.int64)) + trie.first_leaf
    levels = [nodes]
    for _ in range(trie.depth - 1):
        parents, gone = np.unique(trie.parent[nodes], return_counts=True)
        nodes = parents[gone == trie.first_child[parents + 1] - trie.first_child[parents]]
        levels.append(nodes)
    return levels[::-1]
