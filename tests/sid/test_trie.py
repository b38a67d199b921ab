"""The trie against sets of prefixes computed directly."""

import numpy as np
import pytest

from polyrec.core.errors import CatalogError
from polyrec.sid import trie as trie_module
from polyrec.sid.trie import build_trie, complete_trie, dead_nodes, leaves_of_rows, live_nodes


def random_codes(rng: np.random.Generator) -> np.ndarray:
    depth = int(rng.integers(1, 6))
    sizes = rng.integers(1, 6, depth)
    codes = np.unique(np.stack([rng.integers(0, size, 60) for size in sizes], axis=1), axis=0)
    rng.shuffle(codes)
    return codes[: int(rng.integers(1, len(codes) + 1))]


def paths(trie) -> dict[int, tuple[int, ...]]:
    """Node id -> its prefix, by walking down from the root."""
    found = {0: ()}
    for node in range(trie.first_leaf):
        for child in range(trie.first_child[node], trie.first_child[node + 1]):
            found[child] = (*found[node], int(trie.code[child]))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_nodes_children_and_leaves_match_the_prefix_sets(seed):
    codes = random_codes(np.random.default_rng(seed))
    trie = build_trie(codes)
    depth = codes.shape[1]
    prefix = paths(trie)
    assert trie.depth == depth
    assert trie.num_leaves == len(codes)
    for level in range(depth + 1):
        expected = sorted({tuple(map(int, row[:level])) for row in codes})
        nodes = range(trie.level_starts[level], trie.level_starts[level + 1])
        assert [prefix[node] for node in nodes] == expected  # also: lower node id, lower SID
    for node in range(trie.first_leaf):
        children = list(range(trie.first_child[node], trie.first_child[node + 1]))
        assert [prefix[child][:-1] for child in children] == [prefix[node]] * len(children)
        assert children
        assert trie.parents(np.array(children)).tolist() == [node] * len(children)
    assert trie.first_child[-1] == trie.num_nodes
    for leaf, row in enumerate(trie.rows):
        assert prefix[trie.first_leaf + leaf] == tuple(codes[row])
    assert (trie.rows[leaves_of_rows(trie)] == np.arange(len(codes))).all()


@pytest.mark.parametrize("way", ["list", "sweep"])
@pytest.mark.parametrize("seed", range(20))
def test_live_and_dead_nodes_match_the_leaves_below_each_node(seed, way, monkeypatch):
    rng = np.random.default_rng(100 + seed)
    codes = random_codes(rng)
    trie = build_trie(codes)
    prefix = paths(trie)
    below = {
        node: {leaf for leaf in range(trie.num_leaves) if prefix[trie.first_leaf + leaf][: len(path)] == path}
        for node, path in prefix.items()
    }
    chosen = rng.choice(trie.num_leaves, int(rng.integers(0, trie.num_leaves + 1)), replace=False)
    monkeypatch.setattr(trie_module, "_is_long", lambda trie, leaves: way == "sweep")
    live, dead = live_nodes(trie, chosen), dead_nodes(trie, chosen)
    for level in range(1, trie.depth + 1):
        nodes = range(trie.level_starts[level], trie.level_starts[level + 1])
        assert live[level - 1].tolist() == [node for node in nodes if below[node] & set(chosen.tolist())]
        assert dead[level - 1].tolist() == [node for node in nodes if below[node] <= set(chosen.tolist())]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (np.zeros((0, 3), int), "catalog_empty"),
        (np.zeros((3, 0), int), "catalog_empty"),
        (np.zeros(3, int), "catalog_empty"),
        (np.array([[1, 2], [0, 0], [1, 2]]), "sid_repeated"),
    ],
)
def test_what_is_no_catalog_is_refused(codes, code):
    with pytest.raises(CatalogError) as caught:
        build_trie(codes)
    assert caught.value.code == code


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (4, 1, 3), (2, 2, 2, 2)])
def test_the_complete_tree_is_the_tree_of_all_codes(sizes):
    found, expected = complete_trie(sizes), build_trie(np.array(list(np.ndindex(*sizes))))
    for name in ("first_child", "code", "level_starts", "rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)


@pytest.mark.parametrize("sizes", [(512,) * 3, (8192,) * 3, (8192,) * 5, (2**16,) * 4])
def test_a_complete_tree_that_memory_cannot_hold_is_refused(sizes):
    """Also where the number of leaves wraps around in 64 bits, to 0 or below."""
    with pytest.raises(CatalogError, match=f"{np.prod(np.array(sizes, object)):,}") as caught:
        complete_trie(sizes)
    assert caught.value.code == "code_space_too_large"


@pytest.mark.parametrize("offset", [-3, 2**20, 2**30])
def test_codes_of_any_size_are_sorted(offset):
    """Also negative ones and those whose SID and row fill more than 64 bits."""
    rng = np.random.default_rng(7)
    codes = np.unique(rng.integers(0, 6, (90, 3)), axis=0) + offset
    rng.shuffle(codes)
    trie = build_trie(codes)
    order = sorted(range(len(codes)), key=lambda row: tuple(codes[row]))
    assert trie.rows.tolist() == order
    assert trie.code[trie.first_leaf :].tolist() == codes[order, -1].tolist()
    assert trie.code[1 : trie.level_starts[2]].tolist() == sorted(set(codes[:, 0].tolist()))


def test_long_lists_of_a_large_catalog_are_swept_and_short_ones_are_not(monkeypatch):
    trie = build_trie(np.array(list(np.ndindex(20, 20, 20))))
    calls = []
    swept = trie_module._swept
    monkeypatch.setattr(trie_module, "_swept", lambda *given: calls.append(len(given[1])) or swept(*given))
    for size in (0, 3, 100, 4000, 8000):
        leaves = np.arange(size)
        assert sum(map(len, dead_nodes(trie, leaves))) == size + size // 20 + size // 400
        assert sum(map(len, live_nodes(trie, leaves))) == size + -(-size // 20) + -(-size // 400)
    assert calls == [4000, 4000, 8000, 8000]
