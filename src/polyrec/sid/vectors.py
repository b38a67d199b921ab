"""Item vectors: what a semantic ID is quantised from. Text, co-occurrence, both joined, a sentence model, or one's own.

Every function returns float32 [I, D], a row per item in the caller's order; a row of zeros says "nothing is known of
this item". D may be smaller than `dim` when the data do not have as many directions. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from scipy import sparse

from ..core.errors import ConfigError, DataError

CONTEXT_SMOOTHING = 0.75  # exponent on context counts in PMI, which otherwise favours rare items (Levy et al. 2015)
FILL_NEIGHBOURS = 10  # items whose known half stands in for a missing one when vectors are joined


def text_vectors(texts: Sequence[str | None], dim: int = 64, seed: int = 0) -> np.ndarray:
    """TF-IDF over words and word pairs, then truncated SVD; rows of length 1, or zero where there is no text.

    An error when no item has a usable word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    filled = [text or "" for text in texts]
    # Words of one letter or digit stay ("A", "6"): they part variants of a product. A pair seen once tells nothing.
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2),
        sublinear_tf=True,
        token_pattern=r"(?u)\b\w+\b",
        strip_accents="unicode",
        min_df=2 if len(filled) >= 50 else 1,
        max_features=200_000,
        dtype=np.float64,
    )
    try:
        weights = vectorizer.fit_transform(filled)
    except ValueError as error:  # scikit-learn's "empty vocabulary": no word at all, or none in two items
        raise DataError(
            "text_empty",
            f"None of the {len(filled)} items has a word to make vectors from.",
            "Name the right text columns (--text-column), or use --vectors cooccurrence.",
        ) from error
    return unit_rows(_left_factors(weights, dim, seed, power=1.0))


def cooccurrence_vectors(baskets: sparse.csr_matrix, dim: int = 64, seed: int = 0) -> np.ndarray:
    """Positive pointwise mutual information of items that share a basket, then truncated SVD (factors U·√S, unit rows).

    baskets: CSR [B, I] of 0/1 (see `window_baskets` for sequences). A basket of n items counts each of its pairs
    1/(n − 1): an item weighs the same in every basket, and a wholesaler's order of 500 lines does not drown the rest.
    Items that never share a basket get a zero row.
    """
    present = sparse.csr_matrix(baskets, dtype=np.float64, copy=True)
    present.data[:] = 1.0
    sizes = np.asarray(present.sum(axis=1)).ravel()
    weight = np.divide(1.0, sizes - 1, out=np.zeros_like(sizes), where=sizes > 1)
    pairs = sparse.csr_matrix(present.T @ sparse.diags(weight) @ present)
    pairs = sparse.csr_matrix(pairs - sparse.diags(pairs.diagonal()))
    pairs.eliminate_zeros()
    counts = pairs.tocoo()
    if counts.nnz == 0:
        raise DataError(
            "cooccurrence_empty",
            f"No two of the {present.shape[1]} items were ever bought or seen together.",
            "Use item text instead (--vectors text), or bring more events.",
        )
    totals = np.asarray(pairs.sum(axis=1)).ravel()
    context = totals**CONTEXT_SMOOTHING
    context /= context.sum()
    information = np.log(counts.data / (totals[counts.row] * context[counts.col]))
    kept = information > 0
    ppmi = sparse.csr_matrix((information[kept], (counts.row[kept], counts.col[kept])), shape=pairs.shape)
    return unit_rows(_left_factors(ppmi, dim, seed, power=0.5))


def window_baskets(offsets: np.ndarray, items: np.ndarray, num_items: int, window: int = 5) -> sparse.csr_matrix:
    """Sequences as overlapping baskets: every run of `window` events of a user is one, so near items share more.

    offsets: int [U + 1] into items int [E]. A user with fewer events is one basket. Returns CSR [B, I] of 0/1.
    """
    lengths = np.diff(offsets)
    runs = np.where(lengths > 0, np.maximum(lengths - window + 1, 1), 0)
    owner = np.repeat(np.arange(len(lengths)), runs)
    first = offsets[owner] + np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
    event = first[:, None] + np.arange(window)
    inside = event < np.asarray(offsets)[owner + 1][:, None]
    row = np.broadcast_to(np.arange(len(owner))[:, None], event.shape)[inside]
    return baskets_matrix(row, np.asarray(items)[event[inside]], len(owner), num_items)


def baskets_matrix(basket: np.ndarray, items: np.ndarray, num_baskets: int, num_items: int) -> sparse.csr_matrix:
    """CSR [B, I] of 0/1 from basket numbers [E] and item rows [E]; an item twice in a basket counts once."""
    matrix = sparse.csr_matrix((np.ones(len(items)), (basket, items)), shape=(num_baskets, num_items))
    matrix.data[:] = 1.0
    return matrix


def joined_vectors(text: np.ndarray, cooccurrence: np.ndarray) -> np.ndarray:
    """[I, D1] and [I, D2] side by side, each half scaled to unit rows, so that neither outweighs the other.

    An item that lacks one half gets the mean of that half over the items nearest in the other half, weighted by cosine:
    a product without sales lands among products that read alike. An item that lacks both stays zero.
    """
    text, cooccurrence = unit_rows(text), unit_rows(cooccurrence)
    halves = [_filled(text, cooccurrence), _filled(cooccurrence, text)]
    return np.concatenate(halves, axis=1)


def sentence_transformer_vectors(texts: Sequence[str | None], model: str) -> np.ndarray:
    """Embeddings of a sentence-transformers model (extra `text`), unit rows, zero where there is no text."""
    if find_spec("sentence_transformers") is None:
        raise ConfigError(
            "extra_missing",
            "Vectors of a sentence model need the package sentence-transformers, which is not installed.",
            'Run: pip install "polyrec[text]"',
        )
    encoder = import_module("sentence_transformers").SentenceTransformer(model, device="cpu")
    vectors = np.asarray(encoder.encode([text or "" for text in texts], show_progress_bar=False), np.float32)
    vectors[[not (text or "").strip() for text in texts]] = 0
    return unit_rows(vectors)


def load_vectors(path: str | Path, num_items: int) -> np.ndarray:
    """The user's own vectors: a .npy of numbers [I, D], finite, row i for the i-th item of the item table."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError("vectors_missing", f"No vectors file at {path}.", "Check the path given to --vectors.")
    try:
        vectors = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            "vectors_unreadable", f"{path} is not a .npy of numbers: {error}.", "Write it with numpy.save."
        ) from error
    if (
        not isinstance(vectors, np.ndarray)
        or vectors.ndim != 2
        or vectors.dtype.kind not in "fiu"
        or vectors.shape[1] == 0
    ):
        found = f"{vectors.dtype} {vectors.shape}" if isinstance(vectors, np.ndarray) else "an .npz archive"
        raise DataError(
            "vectors_shape",
            f"{path} must hold numbers of shape [items, dimensions], got {found}.",
            "Save one 2-d array.",
        )
    if len(vectors) != num_items:
        raise DataError(
            "vectors_rows",
            f"{path} has {len(vectors)} rows, but the item table has {num_items} items.",
            "Give one row per item, in the order of the item table.",
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is reported as infinite below
        vectors = vectors.astype(np.float32)
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        raise DataError(
            "vectors_not_finite",
            f"{path} has {int((~finite).sum())} rows with NaN or infinity, the first is row {int(np.argmin(finite))}.",
            "Replace them; a row of zeros says that nothing is known of an item.",
        )
    return vectors


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1 (float32); zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 1e-12).astype(np.float32)


def _left_factors(matrix: sparse.csr_matrix, dim: int, seed: int, power: float) -> np.ndarray:
    """U·S^power of the truncated SVD, float64 [I, min(dim, rank)]; signs are fixed by scikit-learn."""
    from sklearn.decomposition import TruncatedSVD

    dim = max(1, min(dim, *matrix.shape))
    svd = TruncatedSVD(dim, n_iter=7, random_state=seed)
    factors = svd.fit_transform(matrix)
    strengths = svd.singular_values_
    kept = strengths > strengths[0] * 1e-7  # directions of rounding noise would be blown up by the standardisation
    return factors[:, kept] * strengths[kept] ** (power - 1.0)


def _filled(half: np.ndarray, other: np.ndarray, block: int = 1024) -> np.ndarray:
    """`half` with its zero rows filled from the rows that are nearest in `other` (both unit or zero rows)."""
    known = np.flatnonzero(half.any(axis=1) & other.any(axis=1))
    missing = np.flatnonzero(~half.any(axis=1) & other.any(axis=1))
    if len(known) == 0 or len(missing) == 0:
        return half
    half = half.copy()
    nearest = min(FILL_NEIGHBOURS, len(known))
    for start in range(0, len(missing), block):
        rows = missing[start : start + block]
        cosine = other[rows] @ other[known].T
        top = np.argsort(-cosine, axis=1, kind="stable")[:, :nearest]
        weight = np.maximum(np.take_along_axis(cosine, top, axis=1), 1e-6)
        half[rows] = unit_rows(np.einsum("mk,mkd->md", weight, half[known[top]]))
    return half
