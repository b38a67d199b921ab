"""The catalog's SIDs as a prefix tree in flat arrays (CSR). numpy only; the engine moves the arrays to a device.

Nodes are numbered breadth first and in SID order within a level, so the children of a node are a contiguous range of node
ids, leaf k of the last level is the k-th SID in order, and "lower node id" is "lower SID" at every level.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import CatalogError

MAX_COMPLETE_LEAVES = 50_000_000  # of a tree of all code sequences: some 2 GB


@dataclass(frozen=True, eq=False)
class Trie:
    """first_child: int [inner nodes + 1], children of v are first_child[v] … first_child[v + 1] − 1 (v = 0 is the root).

    code: int32 [nodes], the code on the edge into a node (−1 for the root). level_starts: int64 [S + 2], node ids of level l
    are level_starts[l] … level_starts[l + 1] − 1; level 0 is the root. rows: int [leaves], the catalog row of each leaf in
    SID order. `int` is int32 while the numbers fit, else int64.
    """

    first_child: np.ndarray
    code: np.ndarray
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

    def parents(self, nodes: np.ndarray) -> np.ndarray:
        """nodes int [K], none of them the root -> the node above each, int64 [K]."""
        return np.searchsorted(self.first_child, nodes.astype(self.first_child.dtype), side="right") - 1

    def row_of(self, codes: Sequence[int] | np.ndarray) -> int | None:
        """The row of a whole SID, codes [S]; None when it is not in the tree."""
        if len(codes) != self.depth:
            return None
        # Views read one element four times faster than numpy does.
        code, first_child = self.code.data, self.first_child.data
        node = 0
        for wanted in codes:
            end = first_child[node + 1]
            node = bisect_left(code, wanted, first_child[node], end)
            if node == end or code[node] != wanted:
                return None
        return int(self.rows[node - self.first_leaf])


def build_trie(codes: np.ndarray) -> Trie:
    """Builds the tree from codes int [N, S], N >= 1, all rows different (a repeated SID is a CatalogError)."""
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.shape[0] == 0 or codes.shape[1] == 0:
        raise CatalogError(
            "catalog_empty", f"A catalog needs at least one SID, got shape {codes.shape}.", "Add items to the catalog."
        )
    rows, columns = _in_order(codes)
    starts = []  # for each level 1…S the ranks of the SIDs that open a node of it
    changed = np.zeros(len(rows), bool)
    changed[0] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
        starts.append(np.flatnonzero(changed))
    if not changed.all():
        first = int(np.argmin(changed))
        raise CatalogError(
            "sid_repeated",
            f"{len(rows) - len(starts[-1])} items repeat another item's SID, the first is "
            f"{[int(column[first]) for column in columns]}.",
            "Give each item its own SID (`polyrec prepare` does).",
        )
    level_starts = np.cumsum([0, 1, *map(len, starts)]).astype(np.int64)
    number = index_dtype(int(level_starts[-1]))
    first_child = np.empty(int(level_starts[-2]) + 1, number)
    code = np.empty(int(level_starts[-1]), np.int32)
    first_child[0], code[0], first_child[-1] = 1, -1, level_starts[-1]
    for level, column in enumerate(columns, 1):
        begin, end = level_starts[level], level_starts[level + 1]
        code[begin:end] = column[starts[level - 1]]
        if level < len(columns):  # a node's first child opens at the same rank as the node itself
            first_child[begin:end] = np.searchsorted(starts[level], starts[level - 1]) + end
    return Trie(first_child, code, level_starts, rows)


def index_dtype(largest: int) -> type[np.signedinteger]:
    """int32 while `largest` fits."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def _in_order(codes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows in SID order [N], and the codes of each level in that order [N].

    Where a SID and its row fit into 64 bits together, the numbers themselves are sorted: five times faster than `lexsort`.
    """
    num = len(codes)
    number = index_dtype(num)
    bits = [int(code).bit_length() for code in codes.max(axis=0)]
    row_bits = (num - 1).bit_length()
    if codes.min() < 0 or sum(bits) + row_bits > 64:
        rows = np.lexsort(codes.T[::-1])
        return rows.astype(number), [codes[rows, level] for level in range(codes.shape[1])]
    keys = np.zeros(num, np.uint64)
    for level, width in enumerate(bits):
        keys <<= np.uint64(width)
        keys |= codes[:, level].astype(np.uint64)
    keys <<= np.uint64(row_bits)
    keys |= np.arange(num, dtype=np.uint64)
    keys.sort()
    columns = []
    shift = row_bits
    for width in reversed(bits):
        columns.append(((keys >> np.uint64(shift)) & np.uint64((1 << width) - 1)).astype(np.int32))
        shift += width
    return (keys & np.uint64((1 << row_bits) - 1)).astype(number), columns[::-1]


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
    number = index_dtype(int(level_starts[-1]))
    return Trie(
        first_child=np.concatenate([[1], 1 + np.cumsum(fanout)]).astype(number),
        code=code.astype(np.int32),
        level_starts=level_starts,
        rows=np.arange(counts[-1], dtype=number),
    )


def leaves_of_rows(trie: Trie) -> np.ndarray:
    """The inverse of `rows`: int [catalog rows] -> leaf number."""
    leaves = np.empty(trie.num_leaves, trie.rows.dtype)
    leaves[trie.rows] = np.arange(trie.num_leaves, dtype=trie.rows.dtype)
    return leaves


def live_nodes(trie: Trie, leaves: np.ndarray) -> list[np.ndarray]:
    """For levels 1…S the sorted node ids, int64, that lead to any of `leaves` (leaf numbers, int [L]): an allow list's
    own tree."""
    if _is_long(trie, leaves):
        return _swept(trie, leaves, np.logical_or)
    nodes = np.unique(np.asarray(leaves, np.int64)) + trie.first_leaf
    levels = [nodes]
    for _ in range(trie.depth - 1):
        nodes = np.unique(trie.parents(nodes))
        levels.append(nodes)
    return levels[::-1]


def dead_nodes(trie: Trie, leaves: np.ndarray) -> list[np.ndarray]:
    """For levels 1…S the sorted node ids, int64, whose every leaf is in `leaves` (leaf numbers, int [L]): what an exclusion
    takes away."""
    if _is_long(trie, leaves):
        return _swept(trie, leaves, np.logical_and)
    nodes = np.unique(np.asarray(leaves, np.int64)) + trie.first_leaf
    levels = [nodes]
    for _ in range(trie.depth - 1):
        parents, gone = np.unique(trie.parents(nodes), return_counts=True)
        nodes = parents[gone == trie.first_child[parents + 1] - trie.first_child[parents]]
        levels.append(nodes)
    return levels[::-1]


def _is_long(trie: Trie, leaves: np.ndarray) -> bool:
    """Sorting a list costs some 100 ns an entry, sweeping the whole tree about 2 ns a node."""
    return len(leaves) * 64 > trie.num_leaves


def _swept(trie: Trie, leaves: np.ndarray, rule: np.ufunc) -> list[np.ndarray]:
    """For levels 1…S the ids of nodes that are marked, a node's mark being `rule` over its children's."""
    marked = np.zeros(trie.num_leaves, bool)
    marked[leaves] = True
    levels = [np.flatnonzero(marked) + trie.first_leaf]
    for level in range(trie.depth - 1, 0, -1):
        begin, end = trie.level_starts[level], trie.level_starts[level + 1]
        # Every inner node has a child, which `reduceat` needs.
        marked = rule.reduceat(marked, trie.first_child[begin:end] - end)
        levels.append(np.flatnonzero(marked) + begin)
    return levels[::-1]
