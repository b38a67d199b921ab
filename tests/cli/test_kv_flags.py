"""The key-value cache's flags: one set of defaults, checked before anything is opened, and they reach the server."""

from __future__ import annotations

import inspect

import pytest
import typer
from typer.testing import CliRunner

from polyrec.cli.kv_flags import kv_flags
from polyrec.cli.main import build_app
from polyrec.core.errors import ConfigError
from polyrec.kvcache.options import KVConfig
from polyrec.server import launch

ALL = {
    "kv_cache_dtype": "fp8",
    "prefix_cache": False,
    "memory_fraction": 0.5,
    "max_length": 4096,
    "host_cache_gib": 2.5,
}
FLAGS = ["--kv-cache-dtype", "fp8", "--no-prefix-cache", "--memory-fraction", "0.5", "--max-length", "4096"]
FLAGS += ["--host-cache-gib", "2.5"]


@pytest.fixture
def given():
    """What a small command receives for these arguments."""

    def run(*arguments: str) -> KVConfig:
        seen: list[KVConfig] = []
        app = typer.Typer(context_settings=dict(build_app().info.context_settings))

        @app.command()
        @kv_flags
        def command(*, kv: KVConfig) -> None:
            """A command."""
            seen.append(kv)

        result = CliRunner().invoke(app, list(arguments))
        if isinstance(result.exception, ConfigError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen[0]

    return run


def test_every_option_has_a_flag():
    assert set(inspect.signature(kv_flags(lambda *, kv: None)).parameters) == set(KVConfig.model_fields) == set(ALL)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], KVConfig()),
        (FLAGS, KVConfig(**ALL)),
        (["--prefix-cache", "--kv_cache_dtype=bf16"], KVConfig(kv_cache_dtype="bf16")),
        (["--memory-fraction", "1"], KVConfig(memory_fraction=1.0)),
    ],
)
def test_flags_reach_their_options(given, flags, expected):
    assert given(*flags) == expected


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--memory-fraction", "0"),
        ("--memory-fraction", "1.01"),
        ("--memory-fraction", "nan"),
        ("--max-length", "0"),
        ("--host-cache-gib", "-1"),
        ("--host-cache-gib", "inf"),
    ],
)
def test_values_out_of_range_are_told(given, flag, value):
    with pytest.raises(ConfigError, match="the key-value cache's flags") as caught:
        given(flag, value)
    assert caught.value.code == "config_invalid"
    assert flag.strip("-").replace("-", "_") in str(caught.value)


def test_serve_hands_them_to_the_server(polyrec, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run_server", lambda folder, settings: seen.append(settings.kv))
    monkeypatch.setattr("polyrec.server.logs.configure_logs", lambda level: None)
    assert polyrec("serve", tmp_path, *FLAGS).exit_code == 0
    assert polyrec("serve", tmp_path).exit_code == 0
    assert seen == [KVConfig(**ALL), KVConfig()]
