"""Residual k-means: vectors in, codes out, and a guarantee that no two items share a SID. Imports no torch.

Level l's codebook is fitted to what the levels before it left over. Codebooks are frozen afterwards: an item's codes
depend on its vector, the codebooks, and which codes are taken, so new items are placed without moving the old ones.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import CatalogError, CheckpointError, ConfigError
from ..core.files import atomic_path

KMEANS_ROUNDS = 25
RESET_ROUNDS = 10


@dataclass(frozen=True, eq=False)
class Codebooks:
    """mean, std: float32 [D], the standardisation. centroids: S arrays float32 [C_l, D] in standardised space."""

    mean: np.ndarray
    std: np.ndarray
    centroids: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes per level."""
        return tuple(len(level) for level in self.centroids)

    def standardise(self, vectors: np.ndarray) -> np.ndarray:
        """float [I, D] -> float32 [I, D] with the fitted items' mean 0 and variance 1 per dimension."""
        vectors = np.asarray(vectors, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != len(self.mean):
            raise CatalogError(
                "vectors_dimension",
                f"The codebooks were fitted on vectors of {len(self.mean)} dimensions, got shape {vectors.shape}.",
                "Make the vectors the same way as when the codebooks were fitted.",
            )
        return (vectors - self.mean) / self.std

    def digest(self) -> str:
        """SHA-256 of shapes and values, hex."""
        digest = hashlib.sha256()
        for array in (self.mean, self.std, *self.centroids):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array, "<f4").tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes safetensors: mean, std, centroids.0 …, the digest in the metadata."""
        from safetensors.numpy import save_file

        arrays = {"mean": self.mean, "std": self.std}
        arrays |= {f"centroids.{level}": array for level, array in enumerate(self.centroids)}
        with atomic_path(path) as temporary:
            save_file(
                {name: np.ascontiguousarray(a) for name, a in arrays.items()}, temporary, {"digest": self.digest()}
            )

    @classmethod
    def load(cls, path: str | Path) -> Codebooks:
        """Reads what `save` wrote; a file that is broken or was changed is a CheckpointError."""
        from safetensors import SafetensorError, safe_open

        remedy = "Run `polyrec prepare` again."
        if not Path(path).is_file():
            raise CheckpointError("codebooks_missing", f"No codebooks at {path}.", remedy)
        try:
            with safe_open(str(path), "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                recorded = (file.metadata() or {}).get("digest")
        except SafetensorError as error:
            raise CheckpointError("codebooks_unreadable", f"{path} cannot be read: {error}.", remedy) from error
        levels = [f"centroids.{level}" for level in range(len(arrays) - 2)]
        if not levels or set(arrays) != {"mean", "std", *levels}:
            raise CheckpointError("codebooks_unreadable", f"{path} holds {sorted(arrays)}, not codebooks.", remedy)
        codebooks = cls(arrays["mean"], arrays["std"], tuple(arrays[name] for name in levels))
        if recorded != codebooks.digest():
            raise CheckpointError("codebooks_changed", f"{path} does not match its own digest.", remedy)
        return codebooks


def choose_codebook_sizes(num_items: int, depth: int = 3) -> tuple[int, ...]:
    """One power of two for every level: about one prefix of length S − 1 per item (size² ≈ I at depth 3).

    Then a prefix holds few items, and the last level's codes, as many again, leave room to part them. Smaller codebooks
    crowd the prefixes; larger ones have more codes than k-means has items to fit them to, so later levels fit noise,
    tokens are too rare to be learnt, and neighbours stop sharing a prefix. Where that rule leaves too little room
    (depth 1 and 2, few items), the code space is at least four times the catalog.
    """
    if num_items < 1 or depth < 1:
        raise ConfigError("codebook_sizes", f"No sizes for {num_items} items and depth {depth}.", "Need at least 1.")
    one_per_prefix = round(math.log2(num_items) / max(depth - 1, 2))
    four_times = math.ceil(math.log2(4 * num_items) / depth)
    return (2 ** max(one_per_prefix, four_times, 2),) * depth


def fit_codebooks(vectors: np.ndarray, sizes: tuple[int, ...], seed: int = 0) -> Codebooks:
    """Fits S codebooks to vectors float [I, D]: the same vectors, sizes and seed give the same bits.

    A code that no item uses is moved to the item that is worst described, while there are different items to give it.
    """
    vectors = np.asarray(vectors, np.float32)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise CatalogError(
            "catalog_empty", f"Codebooks need items, got vectors of shape {vectors.shape}.", "Add items."
        )
    code_space(sizes)
    mean = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = vectors.std(axis=0, dtype=np.float64).astype(np.float32)
    std[std < 1e-6] = 1.0  # a constant dimension says nothing; it must not become 0 / 0
    residual = (vectors - mean) / std
    centroids = []
    for level, size in enumerate(sizes):
        centroids.append(_fit_level(residual, size, seed + level))
        residual = residual - centroids[-1][nearest(residual, centroids[-1])[0]]
    return Codebooks(mean, std, tuple(centroids))


def encode(vectors: np.ndarray, codebooks: Codebooks) -> tuple[np.ndarray, np.ndarray]:
    """Each item's nearest code level by level: codes int32 [I, S], which may repeat, and squared errors float32 [I]."""
    residual = codebooks.standardise(vectors)
    codes = np.zeros((len(residual), len(codebooks.centroids)), np.int32)
    for level, centroids in enumerate(codebooks.centroids):
        codes[:, level], _ = nearest(residual, centroids)
        residual = residual - centroids[codes[:, level]]
    return codes, (residual**2).sum(axis=1)


def assign_unique(vectors: np.ndarray, codebooks: Codebooks, taken: np.ndarray | None = None) -> np.ndarray:
    """A SID of its own for each item: codes int32 [I, S], none repeated, none in `taken` (codes [T, S] of other items).

    Of the items that want one SID, the one nearest to what it stands for keeps it (the upper row in a tie). The others,
    again nearest first, go down the levels by the nearest code under which something is free: another last code of the
    same prefix while there is one, then the next nearest prefix. Items in `taken` do not move.
    """
    sizes = codebooks.sizes
    occupied = np.zeros(0, np.int64) if taken is None or len(taken) == 0 else np.unique(_keys(taken, sizes))
    space = code_space(sizes)
    if len(occupied) + len(vectors) > space:
        raise CatalogError(
            "sid_space_full",
            f"{len(vectors)} items need SIDs and {len(occupied)} are taken; codebooks {sizes} have only {space}.",
            "Prepare with larger --codebook-sizes or a greater --depth.",
        )
    codes, errors = encode(vectors, codebooks)
    keys = _keys(codes, sizes)
    order = np.lexsort((np.arange(len(keys)), errors))  # nearest first, the upper row in a tie
    _, first = np.unique(keys[order], return_index=True)
    keeps = np.zeros(len(keys), bool)
    keeps[order[first]] = True
    keeps &= ~np.isin(keys, occupied)
    movers = order[~keeps[order]]
    if len(movers):
        free = _FreeCodes(sizes, np.union1d(occupied, keys[keeps]))
        residuals = codebooks.standardise(np.asarray(vectors)[movers])
        for row, residual in zip(movers, residuals, strict=True):
            codes[row] = free.take_nearest(residual, codebooks.centroids)
    return codes


class _FreeCodes:
    """Which SIDs are free. A SID's or prefix's key is its codes as the digits of one number, so that the SIDs under a
    prefix are a range of keys and one sorted array answers for all of them."""

    def __init__(self, sizes: tuple[int, ...], occupied: np.ndarray) -> None:
        self._sizes = sizes
        self._occupied = occupied  # sorted keys at the start; later ones are only in _taken
        self._taken: dict[int, np.ndarray] = {}  # last-level prefix -> bool [C]; made when first asked for
        self._full: list[set[int]] = []  # by prefix length 1 … S − 1: keys of prefixes under which nothing is free
        full = occupied
        for size in reversed(sizes[1:]):
            prefixes, counts = np.unique(full // size, return_counts=True)
            full = prefixes[counts == size]
            self._full.insert(0, set(full.tolist()))

    def take_nearest(self, residual: np.ndarray, centroids: tuple[np.ndarray, ...]) -> list[int]:
        """Goes down from the root by the nearest code that leads to a free SID, and takes that SID."""
        codes: list[int] = []
        prefix = 0
        for level, table in enumerate(centroids):
            distances = _squared_distances(residual[None], table)[0]
            distances[self._closed(prefix, level)] = np.inf
            codes.append(int(distances.argmin()))
            prefix = prefix * self._sizes[level] + codes[-1]
            residual = residual - table[codes[-1]]
        self._take(prefix)
        return codes

    def _closed(self, prefix: int, level: int) -> np.ndarray | list[int]:
        """Codes below `prefix` that cannot be chosen, as an index into the level's codes."""
        if level == len(self._sizes) - 1:
            return self._last_level(prefix)
        size = self._sizes[level]
        full = self._full[level]
        return [code for code in range(size) if prefix * size + code in full] if full else []

    def _last_level(self, prefix: int) -> np.ndarray:
        if prefix not in self._taken:
            size = self._sizes[-1]
            low, high = np.searchsorted(self._occupied, [prefix * size, (prefix + 1) * size])
            self._taken[prefix] = np.zeros(size, bool)
            self._taken[prefix][self._occupied[low:high] - prefix * size] = True
        return self._taken[prefix]

    def _take(self, key: int) -> None:
        prefix, code = divmod(key, self._sizes[-1])
        self._last_level(prefix)[code] = True
        full = bool(self._taken[prefix].all())
        for level in range(len(self._sizes) - 2, -1, -1):
            if not full:
                return
            self._full[level].add(prefix)
            size = self._sizes[level]
            prefix //= size
            full = all(prefix * size + other in self._full[level] for other in range(size))


def nearest(vectors: np.ndarray, centroids: np.ndarray, block: int = 8192) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centroid (the lower code in a tie) int32 [I] and squared distance float32 [I]."""
    codes, distances = np.empty(len(vectors), np.int32), np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), block):
        part = vectors[start : start + block]
        squared = _squared_distances(part, centroids)
        codes[start : start + block] = best = squared.argmin(axis=1)
        distances[start : start + block] = squared[np.arange(len(part)), best]
    return codes, distances


def code_space(sizes: tuple[int, ...]) -> int:
    """How many SIDs there are; sizes must be positive and the product fit a 64-bit key."""
    remedy = "Give 1 to 26 sizes of at least 1, or leave --codebook-sizes out."
    if not sizes or min(sizes) < 1 or len(sizes) > 26:
        raise ConfigError("codebook_sizes", f"Codebook sizes {list(sizes)} cannot be used.", remedy)
    if (space := math.prod(int(size) for size in sizes)) >= 2**63:
        raise ConfigError("codebook_sizes", f"Codebook sizes {list(sizes)} span more than 2^63 SIDs.", remedy)
    return space


def _keys(codes: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Codes int [N, S] -> their keys int64 [N]; codes outside the codebooks are a CatalogError."""
    codes = np.asarray(codes, np.int64)
    if codes.ndim != 2 or codes.shape[1] != len(sizes) or (codes < 0).any() or (codes >= np.array(sizes)).any():
        raise CatalogError(
            "sid_outside_codebooks",
            f"Codes of shape {codes.shape} do not fit codebooks of sizes {sizes}.",
            "Use the catalog and the codebooks of one prepared folder.",
        )
    keys = np.zeros(len(codes), np.int64)
    for level, size in enumerate(sizes):
        keys = keys * size + codes[:, level]
    return keys


def _squared_distances(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """float32 [I, C]; ‖v‖² − 2 v·c + ‖c‖², never negative."""
    squared = (vectors**2).sum(axis=1)[:, None] - 2 * (vectors @ centroids.T) + (centroids**2).sum(axis=1)
    return np.maximum(squared, 0, out=squared)


def _fit_level(points: np.ndarray, size: int, seed: int) -> np.ndarray:
    """k-means of float32 [I, D] with `size` centroids and no dead code where that is possible."""
    import faiss

    if len(points) <= size:  # every item its own code; the spare codes lie about the items, for items still to come
        rng = np.random.default_rng(seed)
        spare = points[rng.integers(len(points), size=size - len(points))]
        noise = rng.standard_normal(spare.shape).astype(np.float32) * max(float(points.std()), 1e-3)
        return np.concatenate([points, spare + noise]).astype(np.float32)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # sums in one order: the codes do not depend on how many cores there are
    try:
        kmeans = faiss.Kmeans(
            points.shape[1],
            size,
            niter=KMEANS_ROUNDS,
            seed=seed,
            min_points_per_centroid=1,
            max_points_per_centroid=max(256, len(points) // size + 1),
        )
        kmeans.train(np.ascontiguousarray(points))
    finally:
        faiss.omp_set_num_threads(threads)
    return _reset_dead_codes(points, np.array(kmeans.centroids, np.float32).reshape(size, -1))


def _reset_dead_codes(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Moves unused centroids to the worst described points, then lets the means settle; a few rounds."""
    for _ in range(RESET_ROUNDS):
        codes, errors = nearest(points, centroids)
        counts = np.bincount(codes, minlength=len(centroids))
        dead = np.flatnonzero(counts == 0)
        if len(dead) == 0:  # before the sort of all points below, 5 s for a million of 128 dimensions
            break
        worst = np.argsort(-errors, kind="stable")
        worst = worst[errors[worst] > 1e-6]  # a point that lies on its centroid needs no other
        _, first = np.unique(points[worst], axis=0, return_index=True)  # equal points could not all use the codes
        worst = worst[np.sort(first)][: len(dead)]
        if len(worst) == 0:
            break
        centroids[dead[: len(worst)]] = points[worst]
        codes, _ = nearest(points, centroids)
        counts = np.bincount(codes, minlength=len(centroids))
        sums = np.zeros(centroids.shape, np.float64)
        np.add.at(sums, codes, points)
        used = counts > 0
        centroids[used] = (sums[used] / counts[used, None]).astype(np.float32)
    return centroids
