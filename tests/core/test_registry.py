"""The lazy registry: what it imports and when, and each of its errors."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest

from polyrec.core.registry import Registry, RegistryError


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes importable modules under names of their own and returns the writer."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def failure(code, call):
    with pytest.raises(RegistryError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_loads_what_a_name_stands_for():
    registry = Registry("number", {"fraction": "fractions:Fraction", "from_float": "fractions:Fraction.from_float"})
    assert registry.load("fraction") is Fraction
    assert registry.load("from_float")(0.5) == Fraction(1, 2)


def test_listing_and_asking_import_nothing(modules):
    module = modules("polyrec_test_lazy", "raise AssertionError('imported too early')")
    registry = Registry("model", {"b": f"{module}:B", "a": f"{module}:A"})
    assert registry.names() == ["a", "b"]
    assert "a" in registry
    assert "c" not in registry
    assert registry.path("a") == f"{module}:A"
    assert module not in sys.modules


def test_one_broken_entry_does_not_stop_the_others(modules):
    broken = modules("polyrec_test_broken", "import polyrec_test_not_installed")
    registry = Registry("platform", {"good": "fractions:Fraction", "bad": f"{broken}:Backend"})
    error = failure("platform_import_failed", lambda: registry.load("bad"))
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert error.__cause__.name == "polyrec_test_not_installed"
    assert "polyrec_test_not_installed" in error.remedy
    assert registry.load("good") is Fraction


def test_a_missing_module_and_a_missing_attribute_are_told_apart():
    registry = Registry(
        "model", {"m": "polyrec_test_absent:Model", "a": "fractions:Nothing", "deep": "fractions:Fraction.no"}
    )
    assert "polyrec_test_absent" in str(failure("model_import_failed", lambda: registry.load("m")))
    for name in ("a", "deep"):
        error = failure("model_attribute_missing", lambda name=name: registry.load(name))
        assert isinstance(error.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("value = {}['key']", KeyError),
        ("raise RuntimeError('driver 1 is too old')", RuntimeError),
        ("(", SyntaxError),
        ("raise SystemExit('no licence')", SystemExit),
    ],
)
def test_whatever_a_module_raises_is_told_and_kept_as_the_cause(modules, text, cause):
    module = modules("polyrec_test_faulty", text)
    error = failure("attention_import_failed", lambda: Registry("attention", {"x": f"{module}:value"}).load("x"))
    assert type(error.__cause__) is cause
    assert all(words in error.message for words in (cause.__name__, str(error.__cause__), f"{module}:value"))


def test_what_stops_the_process_is_not_taken_for_a_failed_import(modules):
    module = modules("polyrec_test_interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry("model", {"x": f"{module}:value"}).load("x")


@pytest.mark.parametrize("kind", ["platform", "model", "attention"])
def test_codes_begin_with_the_kind(kind):
    failure(f"{kind}_unknown", lambda: Registry(kind).load("x"))


def test_an_unknown_name_lists_the_known_and_the_closest():
    registry = Registry("platform", {"nvidia": "a:B", "ascend": "a:C"})
    error = failure("platform_unknown", lambda: registry.load("nvidea"))
    assert "ascend, nvidia" in error.message
    assert "'nvidia'" in error.remedy
    assert "none" in failure("model_unknown", lambda: Registry("model").path("x")).message


def test_two_claims_to_one_name():
    registry = Registry("attention", {"sdpa": "a.b:C"})
    registry.register("sdpa", "a.b:C")
    error = failure("attention_taken", lambda: registry.register("sdpa", "x.y:Z"))
    assert "a.b:C" in error.message
    assert "x.y:Z" in error.message
    assert registry.path("sdpa") == "a.b:C"


@pytest.mark.parametrize("path", ["module", "module:", ":attribute", "a..b:c", "a b:c", "a:b:c", "a:b-c", ".a:b"])
def test_a_malformed_path_is_refused_when_registered(path):
    failure("model_path_invalid", lambda: Registry("model").register("x", path))


def test_registries_share_nothing():
    first, second = Registry("model", {"x": "a:B"}), Registry("model")
    assert second.names() == []
    second.register("x", "c:D")
    assert first.path("x") == "a:B"
