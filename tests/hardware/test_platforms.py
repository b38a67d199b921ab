"""Choosing a platform: each way it can fail, and that a process keeps the one it chose.

A process chooses once, so every case runs in a process of its own; one process runs all the failing cases, since a failed
choice chooses nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError
from polyrec.hardware import HardwareBackend, HardwareConfig, get_hardware_backend, platform_names

FAILURES = """
    import json, sys, types
    from polyrec.core.errors import PolyrecError
    from polyrec.hardware import HardwareBackend, HardwareConfig, get_hardware_backend, register_platform
    from polyrec.hardware.backends.cpu import CpuBackend

    module = types.ModuleType("some_platforms")
    module.NotABackend = dict
    module.an_instance = CpuBackend()
    module.OtherName = type("OtherName", (CpuBackend,), {"platform_name": "other"})
    sys.modules["some_platforms"] = module
    register_platform("module_missing", "no_such_module_anywhere:Backend")
    register_platform("attribute_missing", "some_platforms:Absent")
    register_platform("not_a_backend", "some_platforms:NotABackend")
    register_platform("an_instance", "some_platforms:an_instance")
    register_platform("differs", "some_platforms:OtherName")

    def failure(call):
        try:
            call()
        except PolyrecError as error:
            return [error.code, str(error)]
        return None

    found = {name: failure(lambda: get_hardware_backend(HardwareConfig(hardware_platform=name)))
             for name in ("cqu", "module_missing", "attribute_missing", "not_a_backend", "an_instance", "differs")}
    found["taken"] = failure(lambda: register_platform("cpu", "some_platforms:OtherName"))
    found["bad_path"] = failure(lambda: register_platform("bad", "no colon"))
    found["works_after"] = get_hardware_backend(HardwareConfig(hardware_platform="cpu")).platform_name
    print(json.dumps(found))
"""


def run(program: str) -> dict:
    """What a fresh process prints as JSON."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def failures():
    return run(FAILURES)


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("cqu", "platform_unknown", ["'cqu'", "cpu", "Did you mean 'cpu'?"]),
        ("module_missing", "platform_import_failed", ["no_such_module_anywhere", "module_missing"]),
        ("attribute_missing", "platform_attribute_missing", ["some_platforms:Absent"]),
        ("not_a_backend", "platform_not_a_backend", ["not_a_backend", "dict"]),
        ("an_instance", "platform_not_a_backend", ["an_instance"]),
        ("differs", "platform_name_differs", ["'differs'", "'other'"]),
        ("taken", "platform_taken", ["cpu", "OtherName"]),
        ("bad_path", "platform_path_invalid", ["no colon"]),
    ],
)
def test_each_failure_has_its_code_and_names_the_cause(failures, case, code, words):
    found_code, text = failures[case]
    assert found_code == code
    for word in words:
        assert word in text


def test_failed_choices_leave_the_process_usable(failures):
    assert failures["works_after"] == "cpu"


def test_a_process_has_one_backend():
    found = run(
        """
        import json
        from polyrec.core.errors import HardwareError
        from polyrec.hardware import HardwareConfig, get_hardware_backend
        first = get_hardware_backend(HardwareConfig(hardware_platform="cpu"))
        same = get_hardware_backend(HardwareConfig(hardware_platform="cpu")) is first
        unasked = get_hardware_backend() is first
        try:
            get_hardware_backend(HardwareConfig(hardware_platform="elsewhere"))
        except HardwareError as error:
            print(json.dumps({"same": same, "unasked": unasked, "code": error.code, "text": str(error)}))
        """
    )
    assert found["same"]
    assert found["unasked"], "whoever asks for no platform takes the one that is there"
    assert found["code"] == "hardware_chosen_already"
    assert "cpu" in found["text"]
    assert "elsewhere" in found["text"]


def test_the_same_hardware_in_other_words_is_no_change():
    found = run(
        """
        import json
        from polyrec.core.errors import HardwareError
        from polyrec.hardware import HardwareConfig, get_hardware_backend
        first = get_hardware_backend(HardwareConfig(device="cpu"))
        ways = [{}, {"hardware_platform": "cpu"}, {"device": "cpu:0"}, {"hardware_platform": "cpu", "device": "cpu"},
                {"allow_cpu": True}, {"gpu": 0}, {"device": "cpu", "gpu": 0}]
        same = [get_hardware_backend(HardwareConfig(**way)) is first for way in ways]
        refused = []
        ways = ({"device": "cpu:1"}, {"device": "cuda"}, {"device": "cpu", "fallback": "strict"}, {"gpu": 1})
        for way in ways:
            try:
                get_hardware_backend(HardwareConfig(**way))
            except HardwareError as error:
                refused.append([error.code, error.message])
        print(json.dumps({"same": same, "refused": refused}))
        """
    )
    assert found["same"] == [True] * 7
    assert [code for code, _ in found["refused"]] == ["hardware_chosen_already"] * 4
    device, other, strict, index = (message for _, message in found["refused"])
    assert "device='cpu:0'" in device
    assert "device='cpu:1'" in device
    assert device == index
    assert "device='cuda'" in other
    assert "fallback='strict'" in strict
    assert "device" not in strict, "what does not differ is not told"


def test_a_platform_that_cannot_be_built_says_so_and_keeps_the_cause():
    found = run(
        """
        import json, sys, types
        from polyrec.core.errors import HardwareError
        from polyrec.hardware import HardwareBackend, HardwareConfig, get_hardware_backend, register_platform
        from polyrec.hardware.backends.cpu import CpuBackend
        from polyrec.hardware.backends.cpu.runtime import CpuRuntime

        class Busy(CpuRuntime):
            def select(self, index):
                raise RuntimeError("the device is held by another process")

        class BusyBackend(CpuBackend):
            platform_name = "busy"
            def __init__(self):
                super().__init__(runtime=Busy())

        class NeedsArguments(CpuBackend):
            platform_name = "needs"
            def __init__(self, runtime):
                super().__init__(runtime=runtime)

        sys.modules["some_platforms"] = module = types.ModuleType("some_platforms")
        module.BusyBackend, module.NeedsArguments = BusyBackend, NeedsArguments
        register_platform("busy", "some_platforms:BusyBackend")
        register_platform("needs", "some_platforms:NeedsArguments")
        found = []
        for name in ("busy", "needs"):
            try:
                get_hardware_backend(HardwareConfig(hardware_platform=name))
            except HardwareError as error:
                found.append([error.code, error.message, type(error.__cause__).__name__])
        works = get_hardware_backend(HardwareConfig(hardware_platform="cpu")).platform_name
        print(json.dumps({"found": found, "works_after": works}))
        """
    )
    (busy, busy_text, busy_cause), (needs, needs_text, needs_cause) = found["found"]
    assert busy == needs == "platform_build_failed"
    assert "held by another process" in busy_text
    assert "runtime" in needs_text
    assert (busy_cause, needs_cause) == ("RuntimeError", "TypeError")
    assert found["works_after"] == "cpu"


def test_a_process_that_trains_may_recommend_but_not_the_other_way_round():
    found = run(
        """
        import json
        from polyrec.core.errors import HardwareError
        from polyrec.hardware import HardwareConfig, get_hardware_backend, process
        first = get_hardware_backend(HardwareConfig(hardware_platform="cpu", purpose="train"))
        same = get_hardware_backend(HardwareConfig(hardware_platform="cpu")) is first
        process._chosen.clear()
        get_hardware_backend(HardwareConfig(hardware_platform="cpu"))
        try:
            get_hardware_backend(HardwareConfig(hardware_platform="cpu", purpose="train"))
        except HardwareError as error:
            print(json.dumps({"same": same, "code": error.code, "text": str(error)}))
        """
    )
    assert found["same"]
    assert found["code"] == "hardware_chosen_already"
    assert "purpose='train'" in found["text"]


def test_listing_platforms_imports_none():
    found = run(
        """
        import json, sys
        from polyrec.hardware import platform_names
        names = platform_names()
        print(json.dumps({"names": names, "backends": [m for m in sys.modules if ".hardware.backends." in m]}))
        """
    )
    assert "cpu" in found["names"]
    assert found["backends"] == []


def test_auto_without_an_accelerator_is_the_cpu():
    backend = get_hardware_backend()
    assert isinstance(backend, HardwareBackend)
    assert backend.platform_name in platform_names()
    assert get_hardware_backend(HardwareConfig(hardware_platform="auto")) is backend


def test_an_unknown_setting_is_refused():
    with pytest.raises(ConfigError, match="platform"):
        make_settings(HardwareConfig, {"platfrom": "cpu"})
