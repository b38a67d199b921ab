"""The hardware flags: the same for every command, underscores too, checked before anything is opened."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import polyrec.cli
from polyrec.cli.hardware_flags import PANEL, hardware_flags
from polyrec.cli.main import build_app
from polyrec.core.errors import ConfigError, PolyrecError
from polyrec.core.registry import Registry
from polyrec.hardware import HardwareConfig
from polyrec.hardware.base import registry

CLI = Path(polyrec.cli.__file__).parent
COMMANDS = (
    "demo",
    "train",
    "evaluate",
    "recommend",
    "serve",
    "devices",
    "bench make-model",
    "bench offline",
    "bench kernels",
)
# One wrong folder, file or port each, so that opening it first would give another error.
BROKEN = {
    "demo": ["--out", "{file}/out"],
    "train": ["--data", "{absent}", "--out", "{file}/out"],
    "evaluate": ["--data", "{absent}", "--model", "{absent}", "--out", "{file}/out"],
    "recommend": ["{absent}", "--input", "{absent}.csv", "--output", "{file}/out.csv", "--exclude", "{absent}.txt"],
    "serve": ["{absent}", "--port", "1"],
    "bench offline": ["{absent}", "--out", "{file}/out.json"],
    "bench kernels": ["{absent}", "--out", "{file}/out.json"],
}

MISSING = {"not_prepared", "file_missing", "model_folder_missing", "catalog_missing"}


def all_commands() -> dict[str, Any]:
    """`name`, or `group name` -> command."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(build_app()).commands.items():
        inner = getattr(command, "commands", None)
        found.update({name: command} if inner is None else {f"{name} {one}": inner[one] for one in inner})
    return found


def hardware_options(command: Any) -> set[str]:
    return {option.name for option in command.params if getattr(option, "rich_help_panel", None) == PANEL}


@pytest.fixture
def given():
    """What a small command receives for these arguments."""

    def run(*arguments: str) -> HardwareConfig:
        seen: list[HardwareConfig] = []
        app = typer.Typer(context_settings=dict(build_app().info.context_settings))

        @app.command()
        @hardware_flags
        def command(name: str = "x", *, hardware: HardwareConfig) -> None:
            """A command."""
            seen.append(hardware)

        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen[0]

    return run


def test_without_flags_a_command_gets_the_defaults(given):
    assert given() == given("--name", "y") == HardwareConfig()


def test_every_flag_reaches_its_setting(given):
    flags = ["--hardware-platform", "cpu", "--device", "cpu:0", "--gpu", "0", "--allow-cpu", "--attention", "sdpa"]
    flags += ["--extra-ops", "a_b,c", "--extra-ops", "d", "--extra-att", "e", "--fallback", "strict"]
    flags += ["--op", "norm.rms_norm=a_b", "--op", "act.silu_and_mul=c", "--verify-plugins", "full"]
    assert given(*flags) == HardwareConfig(
        hardware_platform="cpu",
        device="cpu:0",
        gpu=0,
        allow_cpu=True,
        attention="sdpa",
        extra_ops=("a_b", "c", "d"),
        extra_att=("e",),
        fallback="strict",
        op={"norm.rms_norm": "a_b", "act.silu_and_mul": "c"},
        verify_plugins="full",
    )


def test_every_setting_but_the_purpose_has_a_flag():
    parameters = inspect.signature(hardware_flags(lambda *, hardware: None)).parameters
    assert set(parameters) == set(HardwareConfig.model_fields) - {"purpose"}


@pytest.mark.parametrize("spelling", ["--{}", "--{}="])
def test_underscores_do_as_well_and_values_keep_theirs(given, spelling):
    def flag(name: str, value: str) -> list[str]:
        text = spelling.format(name)
        return [f"{text}{value}"] if text.endswith("=") else [text, value]

    found = given(
        *flag("hardware_platform", "cpu"), *flag("extra_ops", "my_ops,my-ops"), *flag("op", "kv.write=my_ops")
    )
    assert found == HardwareConfig(hardware_platform="cpu", extra_ops=("my_ops", "my-ops"), op={"kv.write": "my_ops"})
    assert given("--allow_cpu").allow_cpu


def test_underscores_for_a_commands_own_flags_choices_and_paths(polyrec, tmp_path):
    """`--fit_on` is a flag of `train`, its value has a plus; a folder with an underscore is another than one with a hyphen."""
    with pytest.raises(PolyrecError) as caught:
        polyrec(
            "train", "--data", tmp_path / "no_data", "--out", tmp_path / "out", "--batch_size", 3, "--fit_on", "fit"
        )
    assert caught.value.code == "not_prepared"
    assert "no_data" in str(caught.value)
    assert polyrec("train", "--data", tmp_path, "--out", tmp_path, "--no_such_flag", 1).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--op", "norm.rms_norm"], "norm.rms_norm=plugin"),
        (["--op", "=x"], "norm.rms_norm=plugin"),
        (["--gpu", "-1"], "gpu"),
        (["--op", "kv.write=a,kv.write=b"], "'kv.write' is given to 'a' and to 'b'"),
    ],
)
def test_a_flag_that_does_not_parse_is_a_config_error(given, flags, words):
    with pytest.raises(ConfigError, match="the hardware flags") as caught:
        given(*flags)
    assert (caught.value.code, words in str(caught.value)) == ("config_invalid", True)


def test_every_command_that_has_a_flag_has_them_all_in_their_own_panel():
    found = {name: flags for name, command in all_commands().items() if (flags := hardware_options(command))}
    assert set(COMMANDS) <= set(found)
    every = set(HardwareConfig.model_fields) - {"purpose"}
    assert {name: every - flags for name, flags in found.items() if flags != every} == {}
    builders = {path.stem for path in CLI.glob("*.py") if "get_hardware_backend(" in path.read_text(encoding="utf-8")}
    assert builders - {"device_report"} <= {name.split()[0] for name in found}, "a command without the flags"


def test_registering_a_platform_is_the_only_step_to_a_flag(monkeypatch):
    platforms = Registry("platform", {"cpu": registry.platform_path("cpu"), "abacus": "somewhere:Abacus"})
    monkeypatch.setattr(registry, "_PLATFORMS", platforms)
    app = typer.Typer()

    @app.command()
    @hardware_flags
    def command(*, hardware: HardwareConfig) -> None:
        """A command."""

    assert "abacus, cpu" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).output


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("flag", ["--hardware-platform", "--hardware_platform"])
def test_the_platform_is_settled_before_anything_is_opened(polyrec, tmp_path, name, flag):
    (tmp_path / "file").write_text("in the way")
    places = {"absent": tmp_path / "absent", "file": tmp_path / "file"}
    arguments = [argument.format(**places) for argument in BROKEN[name]]
    with pytest.raises(PolyrecError) as with_platform:
        polyrec(*name.split(), *arguments, flag, "abacus")
    assert with_platform.value.code == "platform_unknown"
    with pytest.raises(PolyrecError) as without:
        polyrec(*name.split(), *arguments)
    assert without.value.code in {*MISSING, "path_unusable", "out_occupied"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_baselines_alone_refuse_flags_that_have_no_say(polyrec, tmp_path):
    with pytest.raises(ConfigError, match="--allow-cpu, --extra-ops says") as caught:
        polyrec("evaluate", "--data", tmp_path, "--allow-cpu", "--extra-ops", "a")
    assert caught.value.code == "flag_unused"


def test_training_asks_for_gradients_and_recommending_does_not(polyrec, shop, monkeypatch):
    from polyrec import hardware
    from polyrec.hardware import process

    asked = []

    def noted(config=None, **rest):
        asked.append(config)
        return process.get_hardware_backend(config, **rest)

    monkeypatch.setattr(hardware, "get_hardware_backend", noted, raising=False)
    polyrec("train", "--data", shop / "prepared", "--out", shop / "dry", "--steps", 1, "--dry-run")
    polyrec("recommend", shop / "model", "--history", "P001", "--json", "--hardware-platform", "cpu")
    assert [(config.purpose, config.hardware_platform) for config in asked] == [("train", "auto"), ("infer", "cpu")]


BROKEN_MACHINE = """
    import sys, types
    from polyrec.cli.main import main
    from polyrec.core.registry import Registry
    from polyrec.hardware.base import registry
    from polyrec.hardware.base.probe import Probe

    class LateModule(types.ModuleType):
        def __getattr__(self, name):
            if name != "Abacus":
                raise AttributeError(name)
            from polyrec.hardware.backends.cpu import CpuBackend
            probe = classmethod(lambda cls: Probe.failed("[the rod] is bent"))
            return type(name, (CpuBackend,), {"platform_name": "abacus", "device_type": "beads", "probe": probe})

    sys.modules["accelerators"] = LateModule("accelerators")
    registry._PLATFORMS = Registry("platform", {"cpu": registry.platform_path("cpu"), "abacus": "accelerators:Abacus"})
    main()
"""


def broken_machine(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`polyrec` on a machine whose only accelerator has failed."""
    command = [sys.executable, "-c", textwrap.dedent(BROKEN_MACHINE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_warning_is_one_line_on_standard_error(shop):
    flags = ["recommend", str(shop / "model"), "--history", "P001", "--json"]
    refused = broken_machine(*flags)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error probe_failed: " in refused.stderr
    assert "warning" not in refused.stderr
    allowed = broken_machine(*flags, "--allow-cpu")
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(allowed.stdout)["source"] == "model"
    lines = [line for line in allowed.stderr.splitlines() if "warning" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning [probe_failed] ")
    assert "[the rod] is bent" in lines[0]


def test_the_servers_warnings_are_log_lines(tmp_path):
    result = broken_machine("serve", str(tmp_path / "absent"), "--port", "0", "--allow-cpu")
    assert result.returncode == 2
    first, *rest = result.stderr.splitlines()
    record = json.loads(first)
    assert (record["level"], record["logger"]) == ("warning", "polyrec.hardware")
    assert record["message"].startswith("[probe_failed] ")
    assert "model_folder_missing" in rest[0]
    assert not any(line.startswith("warning") for line in rest)
