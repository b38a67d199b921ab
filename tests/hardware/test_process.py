"""Workers and their parent: the plan travels, the same environment proves the same fingerprint, another one is refused."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from plugin_distributions import ATT, REGISTER, RMS_NORM, on_path, unique, write_plugin

from polyrec.core.config import make_settings
from polyrec.core.errors import HardwareError
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.process import HardwarePlan, check_plan, fingerprint, plan_of

GOOD = RMS_NORM + REGISTER
ATTENTION = """
from polyrec.attention.sdpa import SdpaAttention
from polyrec.plugin_api import register_att_backend

@register_att_backend("own")
class Own(SdpaAttention):
    pass
"""
WORKER = """
import json, sys
from polyrec.core.errors import PolyrecError
from polyrec.hardware import HardwareConfig, get_hardware_backend
from polyrec.hardware.process import HardwarePlan, fingerprint
plan = HardwarePlan.from_dict(json.load(sys.stdin))
try:
    backend = get_hardware_backend(plan=plan)
except PolyrecError as error:
    free = get_hardware_backend(HardwareConfig(hardware_platform="cpu")).platform_name  # nothing was chosen by the failure
    print(json.dumps({"code": error.code, "text": str(error), "free": free}))
else:
    again = get_hardware_backend(plan=plan) is backend
    print(json.dumps({"fingerprint": fingerprint(backend), "again": again, "platform": backend.platform_name}))
"""


def planned(**settings) -> HardwarePlan:
    """This process's plan, built for these settings but not chosen."""
    importlib.invalidate_caches()
    config = make_settings(HardwareConfig, {"hardware_platform": "cpu", **settings})
    return plan_of(config, build_hardware_backend(config))


def worker(plan: HardwarePlan, *folders: Path) -> dict:
    """What a fresh process with these folders on its path makes of the plan, which it gets as JSON."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, folders), *([before] if before else [])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=json.dumps(plan.to_dict()),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def package():
    return unique()


def fast(folder: Path, package: str, version: str) -> Path:
    write_plugin(folder, "fast", GOOD, version=version, package=package)
    return folder


def test_a_worker_of_the_same_environment_proves_the_same_fingerprint(tmp_path, package):
    site = fast(tmp_path / "site", package, "1.0")
    with on_path(site):
        plan = planned(extra_ops="fast", fallback="allow", device="cpu")
    found = worker(plan, site)
    assert found == {"fingerprint": plan.fingerprint, "again": True, "platform": "cpu"}


def test_a_worker_with_another_version_is_refused_with_field_and_versions(tmp_path, package):
    old, new = fast(tmp_path / "old", package, "1.0"), fast(tmp_path / "new", package, "2.0")
    with on_path(old):
        plan = planned(extra_ops="fast")
    found = worker(plan, new)
    assert found["code"] == "plan_differs"
    for word in ("norm.rms_norm", "fast (fast-dist 2.0)", "in the parent", "fast (fast-dist 1.0)", "same versions"):
        assert word in found["text"]
    assert "norm.layer_norm" not in found["text"], "only what differs is named"


def test_a_worker_without_the_plugin_is_refused(tmp_path, package):
    site = fast(tmp_path / "site", package, "1.0")
    with on_path(site):
        plan = planned(extra_ops="fast")
    assert worker(plan)["code"] == "plugin_unknown"


def test_attention_is_part_of_the_fingerprint(tmp_path, package):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, version in ((old, "1.0"), (new, "2.0")):
        write_plugin(folder, "seeing", ATTENTION, group=ATT, version=version, package=package)
    with on_path(old):
        plan = planned(extra_att="seeing")
        plans = [planned(), plan, planned(extra_att="seeing", attention="sdpa")]
    assert len({one.fingerprint for one in plans}) == 3
    found = worker(plan, new)
    assert found["code"] == "plan_differs"
    for word in ("attention (plugins)", "seeing (seeing-dist 2.0)", "seeing (seeing-dist 1.0)"):
        assert word in found["text"]


def test_the_plan_survives_json_and_pickle(tmp_path, package):
    with on_path(fast(tmp_path / "site", package, "1.0")):
        plan = planned(extra_ops="fast", op={"norm.rms_norm": "fast"})
    assert HardwarePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_spawned_pool_gets_the_plan_and_its_refusal_reaches_the_parent(tmp_path, package):
    site = fast(tmp_path / "site", package, "1.0")
    text = (
        "from polyrec.hardware import get_hardware_backend\n"
        "from polyrec.hardware.process import fingerprint\n"
        "def work(plan):\n    return fingerprint(get_hardware_backend(plan=plan))\n"
    )
    (site / f"{package}_worker.py").write_text(text, encoding="utf-8")
    with on_path(site):
        plan = planned(extra_ops="fast")
        work = importlib.import_module(f"{package}_worker").work
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            assert pool.submit(work, plan).result(timeout=120) == plan.fingerprint
            other = HardwarePlan(plan.config, plan.platform, "another", (), {}, {})
            with pytest.raises(HardwareError) as caught:
                pool.submit(work, other).result(timeout=120)
    assert caught.value.code == "plan_differs"
    assert "norm.rms_norm: here" in caught.value.message
    assert "in the parent absent" in caught.value.message


@pytest.mark.parametrize("name", ["polyrec", "torch"])
def test_another_version_of_what_built_in_operations_are_of_is_refused(monkeypatch, name):
    plan = planned()
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", "2.0.0")
    else:
        monkeypatch.setattr("polyrec.hardware.process.__version__", "2.0.0")
    assert planned().fingerprint != plan.fingerprint
    words = rf"\W{name}: here 2\.0\.0, in the parent {re.escape(plan.versions[name])}"
    with pytest.raises(HardwareError, match=words) as caught:
        check_plan(build_hardware_backend(plan.config), plan)
    assert caught.value.code == "plan_differs"


def test_a_plan_of_another_platform_differs(monkeypatch):
    config = HardwareConfig(hardware_platform="cpu")
    backend = build_hardware_backend(config)
    plan = plan_of(config, backend)
    check_plan(backend, plan)
    monkeypatch.setattr(type(backend), "platform_name", "elsewhere")
    assert fingerprint(backend) != plan.fingerprint
    with pytest.raises(HardwareError, match=r"'elsewhere'.*'cpu'") as caught:
        check_plan(backend, plan)
    assert caught.value.code == "plan_differs"


def test_a_thread_that_asks_later_works_on_the_same_device():
    program = """
from threading import Thread, current_thread
from polyrec.hardware import HardwareConfig, get_hardware_backend
get_hardware_backend(HardwareConfig(hardware_platform="cpu"))
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
CpuRuntime.enter_thread = lambda self: print(current_thread().name)
other = Thread(target=get_hardware_backend, name="loads")
other.start()
other.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "loads", done.stderr


def test_threads_that_ask_at_once_get_one_object():
    program = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from polyrec.hardware import HardwareConfig, get_hardware_backend
barrier = Barrier(8)
def ask(_):
    barrier.wait()
    return id(get_hardware_backend(HardwareConfig(hardware_platform="cpu")))
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(ask, range(8)))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr
