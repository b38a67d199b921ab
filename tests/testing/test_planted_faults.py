"""The conformance suite finds planted faults, each in a backend that is right otherwise."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import wrong

from polyrec.attention.sdpa import SdpaAttention
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.base.backend import Capabilities
from polyrec.testing import attention_checks as checks
from polyrec.testing import platform_checks
from polyrec.testing.conformance import AttentionConformance, OpsConformance

FLOAT = torch.float32


@pytest.fixture
def hardware():
    return build_hardware_backend(HardwareConfig(hardware_platform="cpu"))


def branched(cls, hardware, needs):
    checks.check_packed(cls, hardware, needs, branched=True)


@pytest.mark.parametrize(
    ("cls", "check", "options"),
    [
        (wrong.SeesTheNext, checks.check_packed, {}),
        (wrong.MissesItself, checks.check_packed, {}),
        (wrong.SeesNeighbours, checks.check_packed, {}),
        (wrong.SeesOtherBranches, branched, {}),
        (wrong.WindowByPlace, branched, {"window": 4}),
        (wrong.WideWindow, checks.check_packed, {"window": 1}),
        (wrong.WideWindow, checks.check_packed, {"window": 4}),
        (wrong.WideWindow, checks.check_beams, {"window": 1}),
        (wrong.WideWindow, checks.check_beams, {"window": 4}),
        (wrong.NoWindow, checks.check_packed, {"window": 4}),
        (wrong.NoWindow, checks.check_beams, {"window": 4}),
        (wrong.NoCap, checks.check_packed, {"soft_cap": checks.SOFT_CAP}),
        (wrong.NoCap, checks.check_beams, {"soft_cap": checks.SOFT_CAP}),
        (wrong.WideResult, checks.check_packed, {}),
        (wrong.StoresTwice, checks.check_cache, {}),
        (wrong.StoresElsewhereToo, checks.check_cache, {}),
        (wrong.StoresInOneLayer, checks.check_cache, {}),
        (wrong.StoresNothing, checks.check_cache, {}),
        (wrong.StoresNothing, checks.check_beams, {}),
        (wrong.NoKeyGradient, checks.check_gradients, {"train": True}),
        (wrong.OwnRows, checks.check_beams, {}),
        (wrong.NewestAncestorOnly, checks.check_beams, {}),
        (wrong.ShortPrompt, checks.check_beams, {}),
        (wrong.SeesPadding, checks.check_beams, {}),
        (wrong.KeepsTheFirstBatch, checks.check_beams, {}),
        (wrong.WritesThePromptsCache, checks.check_beams, {}),
        (wrong.IgnoresCached, checks.check_prefix, {}),
        (wrong.LastRowsStandTooEarly, checks.check_prefix, {}),
        (wrong.LastRowsStandTooEarly, checks.check_prefix, {"window": 4}),
        (wrong.WritesLastRows, checks.check_prefix, {}),
        (wrong.ForgetsCachedInTheSearch, checks.check_prefix_beams, {}),
        (wrong.PositionWithoutPrefix, checks.check_prefix, {}),
        (wrong.PositionWithoutPrefix, checks.check_prefix, {"window": 4}),
        (wrong.OneTokenTooFar, checks.check_prefix, {}),
        (wrong.OneTokenTooFar, checks.check_prefix, {"window": 4}),
        (wrong.NoWindow, checks.check_prefix, {"window": 4}),
        (wrong.WideWindow, checks.check_prefix_beams, {"window": 4}),
        (wrong.NoCap, checks.check_prefix, {"soft_cap": checks.SOFT_CAP}),
        (wrong.StoresOverThePrefix, checks.check_prefix, {}),
        (wrong.StoresThePrefixAgain, checks.check_prefix, {}),
        (wrong.StoresTwice, checks.check_page_writes, {}),
        (wrong.StoresNothing, checks.check_page_writes, {}),
        (wrong.IgnoresTheTable, checks.check_page_writes, {}),
        (wrong.IgnoresTheTableInTheSearch, checks.check_page_beams, {}),
        (wrong.ReadsPageZero, checks.check_page_beams, {}),
        (wrong.ReadsPageZero, checks.check_prefix, {}),
        (wrong.OneRowForAll, checks.check_page_beams, {}),
        (wrong.OneRowForAll, checks.check_prefix, {}),
        (wrong.OnePageTooFar, checks.check_page_beams, {}),
        (wrong.OnePageTooFar, checks.check_prefix, {}),
        (wrong.OnePageTooLow, checks.check_page_beams, {}),
        (wrong.OnePageTooLow, checks.check_prefix, {}),
        (wrong.OtherPageSize, checks.check_page_beams, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_attention_is_found(hardware, cls, check, options, dtype):
    needs = checks.needs_for(cls.support, dtype, **options)
    with pytest.raises(AssertionError):
        check(cls, hardware, needs)
    check(SdpaAttention, hardware, needs)  # what it is derived from passes


def test_a_last_pass_that_stores_is_found(hardware):
    with pytest.raises(IndexError):
        checks.check_beams(wrong.LastPassStores, hardware, checks.needs_for(SdpaAttention.support, FLOAT))


@pytest.mark.parametrize(
    ("graph", "check"),
    [
        (wrong.FrozenGraph, platform_checks.check_replay),
        (wrong.FrozenGraph, platform_checks.check_random_replay),
        (wrong.LastOfThePool, platform_checks.check_replay),
        (wrong.DrawsOnceMore, platform_checks.check_random_replay),
        (wrong.NeverGivesBack, platform_checks.check_budget),
        (wrong.NeverCounts, platform_checks.check_budget),
        (wrong.NeverRefuses, platform_checks.check_budget),
    ],
)
def test_a_wrong_graph_is_found(hardware, graph, check):
    check(hardware)
    hardware.graph = graph()
    with pytest.raises(AssertionError):
        check(hardware)


def test_a_counted_budget_passes(hardware):
    hardware.graph = wrong.Counted()
    platform_checks.check_budget(hardware)


def test_a_graph_that_records_nothing_but_says_so_is_found(hardware):
    platform_checks.check_failed_capture(hardware)
    hardware.capabilities = Capabilities(captures=True)
    with pytest.raises(AssertionError, match="graph_capture_failed"):
        platform_checks.check_failed_capture(hardware)


@pytest.mark.parametrize(
    ("runtime", "check"),
    [
        (wrong.AliasedCopy, platform_checks.check_copies),
        (wrong.NeverDone, platform_checks.check_copies),
        (wrong.LosesStrides, platform_checks.check_copies),
        (wrong.TurnsIntoFloats, platform_checks.check_copies),
        (wrong.NoSeed, platform_checks.check_random),
        (wrong.NoRestore, platform_checks.check_random),
        (wrong.AnyIndex, platform_checks.check_identity),
        (wrong.TwoDevices, platform_checks.check_identity),
        (wrong.NoTime, platform_checks.check_order),
        (wrong.NoAutocast, platform_checks.check_dtypes),
    ],
)
def test_a_wrong_runtime_is_found(hardware, runtime, check):
    check(hardware)
    hardware.runtime = runtime()
    with pytest.raises(AssertionError):
        check(hardware)


def with_op(hardware, group, **fields):
    ops = dataclasses.replace(getattr(hardware.ops, group), **fields)
    hardware.ops = dataclasses.replace(hardware.ops, **{group: ops})


def test_an_engine_that_ranks_otherwise_is_found(hardware):
    right = hardware.ops.norm.rms_norm
    with_op(hardware, "norm", rms_norm=lambda x, weight, eps: right(x, weight, eps) * 1.05)
    with pytest.raises(AssertionError):
        platform_checks.check_engine(hardware)


def test_a_wrong_operation_is_found(hardware):
    right = hardware.ops.norm.rms_norm
    OpsConformance().test_op(hardware, "norm.rms_norm")
    with_op(hardware, "norm", rms_norm=lambda x, weight, eps: right(x, weight, 2 * eps) * 1.01)
    with pytest.raises(AssertionError, match="rms_norm"):
        OpsConformance().test_op(hardware, "norm.rms_norm")


def test_a_fault_in_large_heads_only_is_found(hardware):
    suite = AttentionConformance()
    checks.check_packed(wrong.SmallHeadsOnly, hardware, checks.needs_for(wrong.SmallHeadsOnly.support, torch.float32))
    with pytest.raises(AssertionError, match="head_dim=128"):
        suite.test_head_sizes(hardware, wrong.SmallHeadsOnly)
    suite.test_head_sizes(hardware, wrong.SdpaAttention)


CASES = """
from wrong import OwnRows
from polyrec.attention.sdpa import SdpaAttention
from polyrec.testing.conformance import AttentionConformance, OpsConformance, PlatformConformance

class TestElsewhere(PlatformConformance):
    platform = "ascend"

class TestNorm(OpsConformance):
    fields = ("norm.rms_norm", "norm.layer_norm")

class TestRight(AttentionConformance):
    attention = SdpaAttention

class TestWrong(AttentionConformance):
    attention = OwnRows
"""


def test_classes_run_skip_aloud_and_fail(tmp_path, request):
    (tmp_path / "test_mine.py").write_text(CASES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rsfp",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    path = {"PYTHONPATH": str(request.path.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=path)
    lines = done.stdout.splitlines()
    skipped = next(line for line in lines if line.startswith("SKIPPED"))
    assert "platform 'ascend' is absent: " in skipped, done.stdout
    assert sum(line.startswith("PASSED") and "::TestNorm::test_op" in line for line in lines) == 2, done.stdout
    failed = {line.split("::")[-1].partition("[")[0].split(" ")[0] for line in lines if line.startswith("FAILED")}
    beams = {"test_beams", "test_beams_of_other_depths", "test_head_sizes", "test_pages"}
    assert failed == {*beams, "test_sliding_window", "test_soft_cap", "test_engine"}
    assert not any("TestRight" in line for line in lines if line.startswith("FAILED"))
    assert done.returncode == 1


def test_without_pytest_it_says_what_to_install():
    code = "import sys; sys.modules['pytest'] = None\nimport polyrec.testing.conformance"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "runs under pytest: pip install pytest" in done.stderr
