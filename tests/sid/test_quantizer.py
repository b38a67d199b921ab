"""Residual k-means and unique SIDs, against float64 brute force on random items."""

import itertools
import math

import numpy as np
import pytest

from polyrec.core.errors import CatalogError, CheckpointError, ConfigError
from polyrec.sid.quantizer import (
    Codebooks,
    assign_unique,
    choose_codebook_sizes,
    code_space,
    encode,
    fit_codebooks,
)


def random_codebooks(rng: np.random.Generator, sizes: tuple[int, ...], dim: int) -> Codebooks:
    return Codebooks(
        rng.standard_normal(dim).astype(np.float32),
        rng.uniform(0.5, 2, dim).astype(np.float32),
        tuple(rng.standard_normal((size, dim)).astype(np.float32) / (level + 1) for level, size in enumerate(sizes)),
    )


def brute_force(vectors: np.ndarray, codebooks: Codebooks, taken: set[tuple[int, ...]]) -> np.ndarray:
    """The rule of `assign_unique` written as plain loops over all SIDs, in float64."""
    sizes = codebooks.sizes
    centroids = [level.astype(np.float64) for level in codebooks.centroids]
    points = (vectors.astype(np.float64) - codebooks.mean) / codebooks.std
    everything = list(itertools.product(*map(range, sizes)))

    def descend(point: np.ndarray, free: set[tuple[int, ...]]) -> tuple[int, ...]:
        prefix: tuple[int, ...] = ()
        for level in range(len(sizes)):
            open_codes = {sid[level] for sid in free if sid[:level] == prefix}
            code = min(open_codes, key=lambda c: (((point - centroids[level][c]) ** 2).sum(), c))
            point = point - centroids[level][code]
            prefix = (*prefix, code)
        return prefix

    def error(point: np.ndarray, sid: tuple[int, ...]) -> float:
        return float(((point - sum(centroids[level][code] for level, code in enumerate(sid))) ** 2).sum())

    wanted = [descend(point, set(everything)) for point in points]
    order = sorted(range(len(points)), key=lambda row: (error(points[row], wanted[row]), row))
    result: dict[int, tuple[int, ...]] = {}
    for row in order:
        if wanted[row] not in taken and wanted[row] not in result.values():
            result[row] = wanted[row]
    free = set(everything) - taken - set(result.values())
    for row in order:
        if row not in result:
            result[row] = descend(points[row], free)
            free.remove(result[row])
    return np.array([result[row] for row in range(len(points))])


@pytest.mark.parametrize("seed", range(30))
def test_unique_sids_match_brute_force(seed):
    rng = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in rng.integers(1, 5, int(rng.integers(1, 5))))
    codebooks = random_codebooks(rng, sizes, dim=4)
    space = list(itertools.product(*map(range, sizes)))
    num_taken = int(rng.integers(0, len(space)))
    taken = [space[i] for i in rng.permutation(len(space))[:num_taken]]
    num = int(rng.integers(1, min(len(space) - num_taken, 40) + 1))
    vectors = rng.standard_normal((num, 4)).astype(np.float32) * rng.choice([0.1, 1.0])
    got = assign_unique(vectors, codebooks, np.array(taken).reshape(-1, len(sizes)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, brute_force(vectors, codebooks, set(taken)))


@pytest.mark.parametrize("sizes", [(27,), (3, 9), (3, 3, 3)])
def test_equal_items_fill_the_whole_code_space(sizes):
    codebooks = random_codebooks(np.random.default_rng(0), sizes, dim=3)
    got = assign_unique(np.ones((27, 3), np.float32), codebooks)
    assert len({tuple(row) for row in got.tolist()}) == 27
    with pytest.raises(CatalogError) as caught:
        assign_unique(np.ones((28, 3), np.float32), codebooks)
    assert caught.value.code == "sid_space_full"
    with pytest.raises(CatalogError):
        assign_unique(np.ones((1, 3), np.float32), codebooks, taken=got)


def test_items_that_collide_stay_under_their_prefix_while_it_has_room():
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((300, 6)).astype(np.float32)
    codebooks = fit_codebooks(vectors, (8, 8, 64))
    wanted, errors = encode(vectors, codebooks)
    got = assign_unique(vectors, codebooks)
    np.testing.assert_array_equal(got[:, :2], wanted[:, :2])
    assert len(np.unique(got, axis=0)) == 300
    assert len(np.unique(wanted, axis=0)) < 300
    for sid in np.unique(wanted, axis=0):
        rivals = np.flatnonzero((wanted == sid).all(axis=1))
        keeper = rivals[np.argmin(errors[rivals])]
        np.testing.assert_array_equal(got[keeper], sid)


def test_new_items_are_placed_without_moving_the_others():
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((400, 8)).astype(np.float32)
    codebooks = fit_codebooks(vectors[:300], (16, 16, 16))
    old = assign_unique(vectors[:300], codebooks)
    new = assign_unique(vectors[300:], codebooks, taken=old)
    both = np.concatenate([old, new])
    assert len(np.unique(both, axis=0)) == 400
    one_by_one = old
    for row in range(300, 310):  # a single item gets what brute force gives it beside all that came before
        added = assign_unique(vectors[row : row + 1], codebooks, taken=one_by_one)
        one_by_one = np.concatenate([one_by_one, added])
    assert len(np.unique(one_by_one, axis=0)) == 310
    again = assign_unique(vectors[:1], codebooks, taken=old)  # the very item again: near its first SID, not on it
    assert not (again == old).all(axis=1).any()


def test_codes_are_the_nearest_centroids_of_the_residuals():
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((500, 10)).astype(np.float32) * rng.uniform(0.1, 30, 10).astype(np.float32) + 5
    codebooks = fit_codebooks(vectors, (8, 4, 8), seed=1)
    codes, errors = encode(vectors, codebooks)
    standard = (vectors.astype(np.float64) - vectors.mean(axis=0)) / vectors.std(axis=0)
    for level, centroids in enumerate(codebooks.centroids):
        distances = ((standard[:, None] - centroids[None]) ** 2).sum(axis=2)
        chosen = distances[np.arange(500), codes[:, level]]
        np.testing.assert_allclose(chosen, distances.min(axis=1), rtol=1e-4, atol=1e-4)
        standard = standard - centroids[codes[:, level]]
    np.testing.assert_allclose(errors, (standard**2).sum(axis=1), rtol=1e-3, atol=1e-4)
    # Each level explains something, and each centroid is near the mean of its items, as k-means ends.
    first = np.stack([((vectors - codebooks.mean) / codebooks.std)[codes[:, 0] == c].mean(axis=0) for c in range(8)])
    np.testing.assert_allclose(codebooks.centroids[0], first, atol=0.3)


def test_kmeans_is_as_good_as_scikit_learns():
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(4)
    centres = rng.standard_normal((12, 6)) * 4
    vectors = (centres[rng.integers(0, 12, 600)] + rng.standard_normal((600, 6))).astype(np.float32)
    codebooks = fit_codebooks(vectors, (16,))
    _, errors = encode(vectors, codebooks)
    reference = KMeans(16, n_init=5, random_state=0).fit(codebooks.standardise(vectors))
    assert errors.sum() < 1.15 * reference.inertia_


def test_the_fit_depends_on_seed_alone_not_on_threads():
    import faiss

    vectors = np.random.default_rng(5).standard_normal((2000, 16)).astype(np.float32)
    threads = faiss.omp_get_max_threads()
    digests = set()
    for count in (1, 2, 4):
        faiss.omp_set_num_threads(count)
        digests.add(fit_codebooks(vectors, (32, 32), seed=7).digest())
        assert faiss.omp_get_max_threads() == count  # left as it was found
    faiss.omp_set_num_threads(threads)
    assert len(digests) == 1
    assert fit_codebooks(vectors, (32, 32), seed=8).digest() not in digests


def test_no_code_is_dead_while_items_differ():
    rng = np.random.default_rng(6)
    crowd = np.repeat(rng.standard_normal((3, 5)), 100, axis=0)  # initial centroids fall on equal items
    vectors = np.concatenate([crowd, rng.standard_normal((29, 5))]).astype(np.float32)
    codebooks = fit_codebooks(vectors, (32, 4))
    codes, errors = encode(vectors, codebooks)
    assert len(np.unique(codes[:, 0])) == 32  # 32 different items, 32 codes
    np.testing.assert_allclose(errors, 0, atol=1e-4)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_fewer_items_than_codes(num):
    vectors = np.random.default_rng(7).standard_normal((num, 4)).astype(np.float32)
    codebooks = fit_codebooks(vectors, (8, 8, 8))
    assert codebooks.sizes == (8, 8, 8)
    assert all(np.isfinite(level).all() for level in codebooks.centroids)
    assert len(np.unique(assign_unique(vectors, codebooks), axis=0)) == num
    assert len(np.unique(assign_unique(np.zeros((100, 4), np.float32), codebooks), axis=0)) == 100


def test_constant_dimensions_do_no_harm():
    vectors = np.random.default_rng(8).standard_normal((50, 4)).astype(np.float32)
    vectors[:, 2] = 3
    codebooks = fit_codebooks(vectors, (4, 4, 4))
    assert np.isfinite(codebooks.standardise(vectors)).all()
    assert codebooks.std[2] == 1


def test_a_saved_codebook_comes_back_and_a_changed_one_is_refused(tmp_path):
    codebooks = random_codebooks(np.random.default_rng(9), (4, 3), dim=5)
    path = tmp_path / "codebooks.safetensors"
    codebooks.save(path)
    loaded = Codebooks.load(path)
    for mine, theirs in zip(
        (codebooks.mean, codebooks.std, *codebooks.centroids), (loaded.mean, loaded.std, *loaded.centroids), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert loaded.digest() == codebooks.digest()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for broken, code in ((None, "codebooks_changed"), (b"x", "codebooks_unreadable"), ("gone", "codebooks_missing")):
        if broken == "gone":
            path.unlink()
        elif broken is not None:
            path.write_bytes(broken)
        with pytest.raises(CheckpointError) as caught:
            Codebooks.load(path)
        assert caught.value.code == code


def test_vectors_and_codes_of_other_codebooks_are_refused():
    codebooks = random_codebooks(np.random.default_rng(10), (4, 3), dim=5)
    with pytest.raises(CatalogError) as caught:
        assign_unique(np.zeros((2, 6), np.float32), codebooks)
    assert caught.value.code == "vectors_dimension"
    for taken in ([[0, 3]], [[-1, 0]], [[0]]):
        with pytest.raises(CatalogError) as caught:
            assign_unique(np.zeros((2, 5), np.float32), codebooks, np.array(taken))
        assert caught.value.code == "sid_outside_codebooks"


@pytest.mark.parametrize(
    ("num_items", "depth", "expected"),
    [(3659, 3, (64,) * 3), (12_101, 3, (128,) * 3), (18_357, 3, (128,) * 3), (12_101, 4, (32,) * 4), (1, 3, (4,) * 3)],
)
def test_chosen_sizes(num_items, depth, expected):
    assert choose_codebook_sizes(num_items, depth) == expected


def test_chosen_sizes_always_leave_room():
    for depth in range(1, 7):
        for num_items in (1, 2, 3, 7, 10, 63, 100, 1000, 12_345, 10**6, 10**7):
            space = math.prod(choose_codebook_sizes(num_items, depth))
            assert space >= 4 * num_items, (depth, num_items)


def test_impossible_sizes_are_refused():
    for sizes in ((), (4, 0), (4, -1), (2,) * 27, (2**21,) * 3):
        with pytest.raises(ConfigError):
            code_space(sizes)
    with pytest.raises(ConfigError):
        choose_codebook_sizes(0)
    with pytest.raises(CatalogError):
        fit_codebooks(np.zeros((0, 4), np.float32), (4,))
