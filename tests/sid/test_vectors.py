"""Item vectors against dense references, and the guards around a user's own."""

import numpy as np
import pytest
from scipy import sparse

from polyrec.core.errors import ConfigError, DataError
from polyrec.sid.vectors import (
    CONTEXT_SMOOTHING,
    baskets_matrix,
    cooccurrence_vectors,
    joined_vectors,
    load_vectors,
    sentence_transformer_vectors,
    text_vectors,
    unit_rows,
    window_baskets,
)


def random_baskets(seed: int, num_baskets: int = 60, num_items: int = 14) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((num_baskets, num_items)) < rng.uniform(0.05, 0.4, num_items)).astype(float)


@pytest.mark.parametrize("seed", range(5))
def test_cooccurrence_is_the_svd_of_ppmi(seed):
    baskets = random_baskets(seed)
    num = baskets.shape[1]
    counts = np.zeros((num, num))
    for basket in baskets:
        inside = np.flatnonzero(basket)
        for i in inside:
            for j in inside:
                if i != j:
                    counts[i, j] += 1 / (len(inside) - 1)
    context = counts.sum(axis=0) ** CONTEXT_SMOOTHING
    with np.errstate(divide="ignore", invalid="ignore"):  # items without a pair: log 0 and 0 / 0
        ppmi = np.nan_to_num(np.maximum(np.log(counts / np.outer(counts.sum(axis=1), context / context.sum())), 0))
    left, strengths, _ = np.linalg.svd(ppmi)
    factors = left * np.sqrt(strengths)
    expected = factors @ factors.T / np.outer(*[np.maximum(np.linalg.norm(factors, axis=1), 1e-9)] * 2)
    got = cooccurrence_vectors(sparse.csr_matrix(baskets * 7), dim=num)  # values do not matter, presence does
    np.testing.assert_allclose(got @ got.T, expected, atol=2e-5)
    assert got.dtype == np.float32


def test_text_vectors_keep_the_cosines_of_tfidf():
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = ["red mug", "blue mug large", "red plate", "", None, "paper bag", "Blue plate LARGE", "paper bag A"]
    weights = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit_transform(
        [text or "" for text in texts]
    )
    got = text_vectors(texts, dim=50)
    np.testing.assert_allclose(got @ got.T, (weights @ weights.T).toarray(), atol=1e-5)
    assert not got[[3, 4]].any()
    assert got.shape[1] <= 8


@pytest.mark.parametrize("texts", [[None, ""], ["!!", "  "], []])
def test_text_without_a_word_is_refused(texts):
    with pytest.raises(DataError) as caught:
        text_vectors(texts)
    assert caught.value.code == "text_empty"


def test_the_same_seed_gives_the_same_bits():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 60, 5)) for _ in range(200)]
    baskets = sparse.csr_matrix(random_baskets(1, 300, 80))
    for make in (lambda: text_vectors(texts, 16, seed=3), lambda: cooccurrence_vectors(baskets, 16, seed=3)):
        np.testing.assert_array_equal(make(), make())


def test_lone_items_get_zero_rows_and_no_pairs_are_refused():
    baskets = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]])
    got = cooccurrence_vectors(sparse.csr_matrix(baskets), dim=3)
    assert got[:3].any(axis=1).all()
    assert not got[3].any()
    with pytest.raises(DataError) as caught:
        cooccurrence_vectors(sparse.csr_matrix(np.eye(4)))
    assert caught.value.code == "cooccurrence_empty"


@pytest.mark.parametrize("window", [2, 3, 5])
def test_windows_are_all_runs_of_a_user(window):
    rng = np.random.default_rng(window)
    lengths = [0, 1, 2, 7, 0, 3, 5, 4]
    offsets = np.cumsum([0, *lengths])
    items = rng.integers(0, 6, offsets[-1])
    expected = []
    for user, length in enumerate(lengths):
        own = items[offsets[user] : offsets[user + 1]].tolist()
        for first in range(max(length - window + 1, min(length, 1))):
            expected.append(np.isin(np.arange(6), own[first : first + window]))
    np.testing.assert_array_equal(window_baskets(offsets, items, 6, window).toarray(), np.array(expected, float))


def test_an_item_twice_in_a_basket_counts_once():
    got = baskets_matrix(np.array([0, 0, 0, 1]), np.array([2, 2, 1, 0]), 2, 3)
    np.testing.assert_array_equal(got.toarray(), [[0, 1, 1], [1, 0, 0]])


def test_joined_halves_weigh_the_same_and_a_missing_half_comes_from_neighbours():
    rng = np.random.default_rng(0)
    text, other = rng.standard_normal((40, 6)), rng.standard_normal((40, 9)) * 100
    text[[0, 2]] = 0
    other[[1, 2]] = 0
    got = joined_vectors(text, other)
    assert got.shape == (40, 15)
    np.testing.assert_allclose(got[3:, :6], unit_rows(text)[3:], rtol=1e-6)
    np.testing.assert_allclose(got[3:, 6:], unit_rows(other)[3:], rtol=1e-6)
    cosine = unit_rows(text)[3:] @ unit_rows(text)[1]
    nearest = np.argsort(-cosine)[:10]
    mean = (np.maximum(cosine[nearest], 1e-6)[:, None] * unit_rows(other)[3:][nearest]).sum(axis=0)
    np.testing.assert_allclose(got[1, 6:], mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[1, :6], unit_rows(text)[1], rtol=1e-6)
    assert got[0, :6].any()
    assert not got[2].any()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("polyrec.sid.vectors.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        sentence_transformer_vectors(["a"], "any")
    assert 'pip install "polyrec[text]"' in caught.value.remedy


def test_a_sentence_model_is_asked_for_every_text(monkeypatch):
    class Model:
        def __init__(self, name, device):
            assert (name, device) == ("some-model", "cpu")

        def encode(self, texts, show_progress_bar):
            return np.array([[len(text) + 3.0, 4.0] for text in texts])

    module = type("module", (), {"SentenceTransformer": Model})
    monkeypatch.setattr("polyrec.sid.vectors.find_spec", lambda name: True)
    monkeypatch.setattr("polyrec.sid.vectors.import_module", lambda name: module)
    np.testing.assert_allclose(
        sentence_transformer_vectors(["", None, "abcde", " "], "some-model"),
        [[0, 0], [0, 0], [8 / 80**0.5, 4 / 80**0.5], [0, 0]],
        rtol=1e-6,
    )


def test_the_users_own_vectors_come_as_they_are(tmp_path):
    path = tmp_path / "own.npy"
    for dtype in (np.float64, np.float16, np.int32):
        values = np.arange(12).reshape(4, 3).astype(dtype)
        np.save(path, values)
        got = load_vectors(path, 4)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (np.zeros(4), "vectors_shape"),
        (np.zeros((4, 0)), "vectors_shape"),
        (np.zeros((4, 2, 1)), "vectors_shape"),
        (np.zeros((4, 2), complex), "vectors_shape"),
        (np.array([["a", "b"]] * 4), "vectors_shape"),
        (np.zeros((5, 2)), "vectors_rows"),
        (np.array([[0, 0], [0, 0], [0, np.nan], [np.inf, 0]]), "vectors_not_finite"),
        (np.array([[1e300, 0]] * 4), "vectors_not_finite"),
        (np.array([[{}, 0]] * 4, object), "vectors_unreadable"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(tmp_path, values, code):
    np.save(tmp_path / "own.npy", values)
    with pytest.raises(DataError) as caught:
        load_vectors(tmp_path / "own.npy", 4)
    assert caught.value.code == code
    if values.dtype == float and np.isnan(values).any():
        assert "2 rows" in caught.value.message
        assert "row 2" in caught.value.message


def test_a_missing_or_foreign_vectors_file_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_vectors(tmp_path / "none.npy", 4)
    assert caught.value.code == "vectors_missing"
    for content in (b"", b"not numpy"):
        (tmp_path / "text.npy").write_bytes(content)
        with pytest.raises(DataError) as broken:
            load_vectors(tmp_path / "text.npy", 4)
        assert broken.value.code == "vectors_unreadable"
    with (tmp_path / "zip.npy").open("wb") as stream:
        np.savez(stream, a=np.zeros(3))
    with pytest.raises(DataError) as archive:
        load_vectors(tmp_path / "zip.npy", 4)
    assert archive.value.code == "vectors_shape"
