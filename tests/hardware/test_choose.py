"""Which platform a process runs on: probing, `--device`, and every way the choice can fail, on made-up accelerators."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from polyrec.core.errors import HardwareError, PolyrecError
from polyrec.core.registry import Registry
from polyrec.hardware import HardwareBackend, HardwareConfig, build_hardware_backend, platform_names
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.base import registry
from polyrec.hardware.base.probe import Probe
from polyrec.hardware.choose import Choice, choose_platform, parse_device, platform_class, probe_platform

MODULE = "polyrec_test_accelerators"
USABLE = Probe.usable(("Board 0", "Board 1"))
ABSENT = Probe.absent("no board is plugged in")
FAILED = Probe.failed("driver 3 is older than 4")
RAISES = RuntimeError("the library does not load")


def accelerator(name: str, answer: object, device_type: str) -> type[HardwareBackend]:
    def probe(cls: type[HardwareBackend]) -> Probe:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    members = {"platform_name": name, "device_type": device_type, "probe": classmethod(probe)}
    return type(name, (CpuBackend,), members)


@pytest.fixture
def machine(monkeypatch):
    """Registers only the CPU and accelerators with these answers; `name_on_type` has another device type than its name."""

    def register(**answers):
        module = types.ModuleType(MODULE)
        monkeypatch.setitem(sys.modules, MODULE, module)
        platforms = Registry("platform", {"cpu": registry.platform_path("cpu")})
        for text, answer in answers.items():
            name, _, device_type = text.partition("_on_")
            if answer is ModuleNotFoundError:
                platforms.register(name, "polyrec_test_not_installed:Backend")
            else:
                setattr(module, name, accelerator(name, answer, device_type or name))
                platforms.register(name, f"{MODULE}:{name}")
        monkeypatch.setattr(registry, "_PLATFORMS", platforms)

    return register


def choose(**config) -> tuple[str, int]:
    choice = choose_platform(HardwareConfig(**config))
    return choice.cls.platform_name, choice.index


def refused(code: str, **config) -> str:
    with pytest.raises(PolyrecError) as caught:
        choose(**config)
    assert caught.value.code == code
    assert caught.value.remedy
    return str(caught.value)


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_auto_takes_the_accelerator_that_answers(machine, caplog):
    machine(abacus=ABSENT, loom=USABLE)
    assert choose() == ("loom", 0)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("answers", [{}, {"abacus": ABSENT}, {"abacus": ABSENT, "loom": ABSENT}])
def test_auto_without_any_sign_of_an_accelerator_is_the_cpu(machine, caplog, answers):
    machine(**answers)
    assert choose() == ("cpu", 0)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FAILED, "driver 3 is older than 4"),
        (RAISES, "RuntimeError: the library does not load"),
        (HardwareError("x", "two values disagree", "mend it"), "two values disagree"),
        (ModuleNotFoundError, "polyrec_test_not_installed"),
    ],
)
def test_a_failed_probe_is_no_cpu_run_unless_allowed(machine, caplog, answer, reason):
    machine(abacus=answer, loom=ABSENT)
    assert probe_platform("abacus").state == "failed"
    text = refused("probe_failed")
    assert all(words in text for words in ("abacus", reason, "--allow-cpu", "--hardware-platform cpu"))
    assert ABSENT.reason not in text
    assert warnings_in(caplog) == []
    assert choose(allow_cpu=True) == ("cpu", 0)
    [warning] = warnings_in(caplog)
    assert warning.startswith("[probe_failed] ")
    assert all(words in warning for words in ("abacus", reason))


def test_all_failed_probes_are_told_at_once(machine):
    machine(abacus=FAILED, loom=RAISES)
    text = refused("probe_failed")
    assert all(words in text for words in ("abacus", FAILED.reason, "loom", str(RAISES)))


def test_naming_the_cpu_needs_no_permission(machine, caplog):
    machine(abacus=FAILED)
    assert choose(hardware_platform="cpu") == choose(device="cpu") == ("cpu", 0)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("answer", [FAILED, RAISES, ModuleNotFoundError])
def test_a_failed_platform_does_not_stop_a_usable_one(machine, caplog, answer):
    machine(abacus=answer, loom=USABLE)
    assert choose() == ("loom", 0)
    assert ["abacus" in warning for warning in warnings_in(caplog)] == [True]


def test_two_usable_platforms_need_a_choice(machine):
    machine(abacus=USABLE, loom=USABLE, quipu=ABSENT)
    text = refused("platforms_ambiguous")
    assert "abacus, loom" in text
    assert "quipu" not in text
    assert choose(hardware_platform="loom") == ("loom", 0)
    assert choose(device="abacus:1") == ("abacus", 1)


def test_a_device_implies_the_platform(machine):
    machine(abacus_on_beads=USABLE, loom_on_thread=USABLE)
    assert choose(device="beads:1") == ("abacus", 1)
    assert choose(device="thread") == ("loom", 0)
    assert choose(device="loom:3") == ("loom", 3)
    assert choose(hardware_platform="abacus", device="beads:2") == ("abacus", 2)


def test_an_index_of_whatever_device_it_is(machine):
    machine(abacus_on_beads=USABLE, quipu=ABSENT)
    assert choose(gpu=1) == choose(gpu=1, device="beads") == choose(gpu=1, device="abacus:1") == ("abacus", 1)
    assert choose(gpu=1, hardware_platform="abacus") == ("abacus", 1)
    assert choose(gpu=0) == choose(gpu=0, device="beads:0") == ("abacus", 0)
    assert choose(gpu=0, hardware_platform="cpu") == ("cpu", 0)


@pytest.mark.parametrize(("device", "gpu"), [("beads:0", 1), ("beads:1", 0), ("abacus:1", 2), ("cpu:0", 1)])
def test_two_indices_that_differ(machine, device, gpu):
    machine(abacus_on_beads=USABLE)
    text = refused("device_index_differs", device=device, gpu=gpu)
    assert all(words in text for words in (f"--device {device}", f"--gpu {gpu}"))


def test_the_host_has_no_second_device(machine):
    machine(abacus=ABSENT)
    for config in ({}, {"hardware_platform": "cpu"}, {"device": "cpu"}):
        assert build_hardware_backend(HardwareConfig(gpu=0, **config)).platform_name == "cpu"
        with pytest.raises(HardwareError) as caught:
            build_hardware_backend(HardwareConfig(gpu=1, **config))
        assert caught.value.code == "device_index"


def test_platforms_that_share_a_device_type(machine):
    machine(abacus_on_beads=ABSENT, soroban_on_beads=USABLE, loom=USABLE)
    assert choose(device="beads:1") == ("soroban", 1)
    machine(abacus_on_beads=USABLE, soroban_on_beads=USABLE, loom=USABLE)
    text = refused("platforms_ambiguous", device="beads")
    assert "abacus, soroban" in text
    assert "loom" not in text


def test_a_device_of_another_platform(machine):
    machine(abacus_on_beads=USABLE, loom_on_thread=USABLE)
    text = refused("device_platform_differs", hardware_platform="abacus", device="thread:1")
    assert all(words in text for words in ("thread:1", "abacus", "beads"))


def test_a_device_that_no_usable_platform_has(machine):
    machine(abacus_on_beads=FAILED, loom_on_thread=ABSENT)
    assert "'tpu'" in refused("device_unknown", device="tpu:0")
    assert FAILED.reason in refused("device_unknown", device="beads")
    # A device that was asked for is never the CPU, and what was looked for is told.
    assert ABSENT.reason in refused("device_unknown", device="thread", allow_cpu=True)


@pytest.mark.parametrize("device", ["", ":0", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cu da", "cuda:²", "cuda,cpu"])
def test_a_device_that_is_none(device):
    with pytest.raises(HardwareError, match="TYPE:INDEX") as caught:
        parse_device(device)
    assert caught.value.code == "device_invalid"
    refused("device_invalid", device=device)


@pytest.mark.parametrize(("device", "parsed"), [(None, (None, 0)), ("cuda", ("cuda", 0)), ("npu:12", ("npu", 12))])
def test_devices_are_parsed(device, parsed):
    assert parse_device(device) == parsed


@pytest.mark.parametrize(("answer", "state"), [(FAILED, "failed"), (ABSENT, "absent"), (RAISES, "failed")])
def test_a_platform_that_is_named_and_cannot_run(machine, answer, state):
    machine(abacus_on_beads=answer, loom=USABLE)
    for config in ({"hardware_platform": "abacus"}, {"device": "abacus"}):
        text = refused("platform_unusable", **config)
        assert all(words in text for words in ("abacus", state, getattr(answer, "reason", str(answer))))
        refused("platform_unusable", **config, allow_cpu=True)


@pytest.mark.parametrize("answer", [None, True, "usable", SystemExit(1)], ids=repr)
def test_a_probe_that_gives_no_answer_has_failed(machine, answer):
    machine(abacus_on_beads=answer)
    reason = probe_platform("abacus").reason
    assert type(answer).__name__ in reason or repr(answer) in reason
    for config in ({}, {"device": "beads"}, {"device": "abacus"}, {"hardware_platform": "abacus"}):
        with pytest.raises(PolyrecError) as caught:
            choose(**config)
        assert reason in str(caught.value)
    assert choose(hardware_platform="cpu") == ("cpu", 0)


@pytest.mark.parametrize("device_type", [None, 3])
def test_a_platform_without_a_device_type_stops_no_other(machine, device_type):
    machine(abacus=USABLE, loom=USABLE)
    platform_class("abacus").device_type = device_type
    assert choose() == ("loom", 0)
    assert "device_type" in refused("device_unknown", device="beads")
    assert "device_type" in refused("platform_not_a_backend", hardware_platform="abacus")


def test_only_what_is_chosen_must_load(machine):
    machine(abacus=ModuleNotFoundError)
    assert choose(hardware_platform="cpu") == ("cpu", 0)
    assert "polyrec_test_not_installed" in refused("platform_import_failed", hardware_platform="abacus")


def test_a_choice_is_the_class_and_the_index(machine):
    machine(abacus=USABLE)
    assert choose_platform(HardwareConfig(device="abacus:1")) == Choice(platform_class("abacus"), 1)


@pytest.mark.parametrize("name", [name for name in platform_names() if name != "cpu"])
def test_a_broken_module_leaves_the_other_platforms_startable(machine, monkeypatch, caplog, name):
    path = registry.platform_path(name)
    machine(abacus=USABLE)
    registry.register_platform(name, path)
    monkeypatch.setitem(sys.modules, path.partition(":")[0], None)  # importing it raises
    assert build_hardware_backend(HardwareConfig(hardware_platform="cpu")).platform_name == "cpu"
    assert build_hardware_backend(HardwareConfig()).platform_name == "abacus"
    assert [name in warning for warning in warnings_in(caplog)] == [True]
    refused("platform_import_failed", hardware_platform=name)
