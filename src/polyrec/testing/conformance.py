"""The suite that any platform, operation or attention backend must pass, for pytest. Subclass what you provide:

    class TestMine(PlatformConformance):
        platform = "mine"

A platform that this machine does not have is skipped with its probe's reason. The checks are in `platform_checks`,
`attention_checks` and `hardware.ops.check`, which need no pytest.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

try:
    import pytest
except ImportError as error:
    raise ImportError("polyrec.testing.conformance runs under pytest: pip install pytest") from error

import torch

from ..hardware import HardwareBackend, HardwareConfig, build_hardware_backend
from ..hardware.attention_choice import PluginAttention
from ..hardware.base.attention import AttentionBackend, AttentionNeeds
from ..hardware.base.config import Purpose
from ..hardware.choose import probe_platform
from ..hardware.ops.check import check_op
from ..hardware.ops.spec import FLOATS
from ..hardware.table import all_specs
from . import attention_checks as checks
from .platform_checks import PLATFORM_CHECKS, check_engine

_BRANCHED = pytest.mark.parametrize("branched", [False, True], ids=["sequences", "branches"])
_DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
_HEADS = pytest.mark.parametrize("heads", checks.HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")


class _OnHardware:
    """platform: a registered name. extra_ops, extra_att: plugins to load, by entry-point name. op: pins, as --op takes them."""

    platform: ClassVar[str] = "cpu"
    extra_ops: ClassVar[tuple[str, ...]] = ()
    extra_att: ClassVar[tuple[str, ...]] = ()
    op: ClassVar[dict[str, str]] = {}
    purpose: ClassVar[Purpose] = "infer"

    @pytest.fixture
    def hardware(self) -> HardwareBackend:
        """The platform, built for this test alone; skips where there is no such device."""
        probe = probe_platform(self.platform)
        if probe.state != "usable":
            pytest.skip(f"platform '{self.platform}' is {probe.state}: {probe.reason}")
        config = HardwareConfig(
            hardware_platform=self.platform,
            extra_ops=self.extra_ops,
            extra_att=self.extra_att,
            op=self.op,
            attention=self.attention_name(),
            fallback="allow",
            verify_plugins="off",  # that is what these tests do
            purpose=self.purpose,
        )
        return build_hardware_backend(config)

    def attention_name(self) -> str:
        """What --attention is given."""
        return "auto"


class PlatformConformance(_OnHardware):
    """Runtime, graphs, capabilities, and a small model through the engine."""

    @pytest.mark.parametrize("check", PLATFORM_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
    def test_platform(self, hardware: HardwareBackend, check: Any) -> None:
        check(hardware)


class OpsConformance(_OnHardware):
    """Every operation against its reference, in every claimed dtype: values, aliasing, views, capture, and gradients.

    fields: those to check, as `norm.rms_norm`; None: all that the platform has. Operations that claim no gradient are checked
    without; set purpose to "train" to have them refused.
    """

    fields: ClassVar[tuple[str, ...] | None] = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each field."""
        if "field" in metafunc.fixturenames:
            metafunc.parametrize("field", list(all_specs() if self.fields is None else self.fields))

    def test_op(self, hardware: HardwareBackend, field: str) -> None:
        row = hardware.table.row(field)
        if row.origin == "absent":
            pytest.skip(f"platform '{self.platform}' has no '{field}'")
        group, _, name = field.partition(".")
        faults = check_op(
            field,
            all_specs()[field],
            getattr(getattr(hardware.ops, group), name),
            runtime=hardware.runtime,
            graph=hardware.graph,
            dtypes=hardware.capabilities.dtypes,
            train=row.train,
            level="full",
        )
        assert not faults, f"{field} of {row.implementation}:\n" + "\n".join(str(fault) for fault in faults)


class AttentionConformance(_OnHardware):
    """One attention backend, on one platform: everything that it claims to support, and the engine with it.

    attention: its registered name, a plugin's (with `extra_att`), or the class itself.
    """

    attention: ClassVar[str | type[AttentionBackend]] = "sdpa"

    def attention_name(self) -> str:
        return self.attention if isinstance(self.attention, str) else "auto"

    @pytest.fixture
    def cls(self, hardware: HardwareBackend) -> type[AttentionBackend]:
        """The backend's class."""
        return hardware.attention.load(self.attention) if isinstance(self.attention, str) else self.attention

    @_BRANCHED
    @_HEADS
    @_DTYPES
    def test_packed(self, hardware: Any, cls: Any, dtype: torch.dtype, heads: tuple[int, int], branched: bool) -> None:
        checks.check_packed(cls, hardware, self.needs(hardware, cls, dtype, heads=heads), branched=branched)

    @_BRANCHED
    @_DTYPES
    def test_gradients(self, hardware: Any, cls: Any, dtype: torch.dtype, branched: bool) -> None:
        checks.check_gradients(cls, hardware, self.needs(hardware, cls, dtype, train=True), branched=branched)

    @_DTYPES
    def test_cache(self, hardware: Any, cls: Any, dtype: torch.dtype) -> None:
        checks.check_cache(cls, hardware, self.needs(hardware, cls, dtype))

    @_HEADS
    @_DTYPES
    def test_beams(self, hardware: Any, cls: Any, dtype: torch.dtype, heads: tuple[int, int]) -> None:
        checks.check_beams(cls, hardware, self.needs(hardware, cls, dtype, heads=heads))

    @_DTYPES
    def test_pages(self, hardware: Any, cls: Any, dtype: torch.dtype) -> None:
        needs = self.needs(hardware, cls, dtype)
        checks.check_page_writes(cls, hardware, needs)
        checks.check_page_beams(cls, hardware, needs)
        if cls.support.prefix:
            checks.check_prefix_beams(cls, hardware, needs)

    @_HEADS
    @_DTYPES
    def test_cached_prefix(self, hardware: Any, cls: Any, dtype: torch.dtype, heads: tuple[int, int]) -> None:
        needs = self.needs(hardware, cls, dtype, heads=heads)
        if not cls.support.prefix:
            pytest.skip(f"{cls.__name__} does not claim cached prefixes")
        checks.check_prefix(cls, hardware, needs)

    @pytest.mark.parametrize("widths", [(3,), (4, 2), (1, 1, 1)], ids=str)
    def test_beams_of_other_depths(self, hardware: Any, cls: Any, widths: tuple[int, ...]) -> None:
        checks.check_beams(cls, hardware, self.needs(hardware, cls, None), widths)

    def test_head_sizes(self, hardware: Any, cls: Any) -> None:
        for head_dim in checks.claimed_head_dims(cls.support):
            needs = self.needs(hardware, cls, None, head_dim=head_dim)
            checks.check_packed(cls, hardware, needs)
            self._check_search(hardware, cls, needs)

    @pytest.mark.parametrize("window", checks.WINDOWS)
    def test_sliding_window(self, hardware: Any, cls: Any, window: int) -> None:
        self._check_all(hardware, cls, self.needs(hardware, cls, None, window=window))

    def test_soft_cap(self, hardware: Any, cls: Any) -> None:
        self._check_all(hardware, cls, self.needs(hardware, cls, None, soft_cap=checks.SOFT_CAP))

    def test_engine(self, hardware: HardwareBackend, cls: type[AttentionBackend]) -> None:
        """Recommendations are those of the CPU's own attention. The tiny model's heads have 8 dims."""
        if lacks := cls.support.lacks(AttentionNeeds(2, 4, 2, 8), hardware.platform_name):
            pytest.skip(f"{cls.__name__} does not claim {', '.join(lacks)}")
        if not isinstance(self.attention, str):  # as if a plugin had registered it
            hardware.attention = _only(hardware, cls)
        check_engine(hardware)

    def needs(
        self, hardware: HardwareBackend, cls: type[AttentionBackend], dtype: torch.dtype | None, **rest: Any
    ) -> AttentionNeeds:
        """A small model's needs; skips what the backend does not claim. dtype None: the first that it claims."""
        claimed = checks.claimed_dtypes(cls.support, hardware)
        if not claimed or (dtype is not None and dtype not in claimed):
            pytest.skip(f"{cls.__name__} on '{hardware.platform_name}' does not claim {dtype or 'any dtype'}")
        needs = checks.needs_for(cls.support, dtype or claimed[0], **rest)
        if lacks := cls.support.lacks(needs, hardware.platform_name):
            pytest.skip(f"{cls.__name__} does not claim {', '.join(lacks)}")
        return needs

    def _check_all(self, hardware: HardwareBackend, cls: type[AttentionBackend], needs: AttentionNeeds) -> None:
        for branched in (False, True):
            checks.check_packed(cls, hardware, needs, branched=branched)
        checks.check_cache(cls, hardware, needs)
        if cls.support.prefix:
            checks.check_prefix(cls, hardware, needs)
        self._check_search(hardware, cls, needs)

    def _check_search(self, hardware: HardwareBackend, cls: type[AttentionBackend], needs: AttentionNeeds) -> None:
        """After cached prefixes, where they are claimed: it is the harder of the two."""
        check = checks.check_prefix_beams if cls.support.prefix else checks.check_beams
        check(cls, hardware, needs)


def _only(hardware: HardwareBackend, cls: type[AttentionBackend]) -> Any:
    """A choice of attention that holds nothing but this class."""
    own = {"under test": PluginAttention(cls, "the conformance suite")}
    return dataclasses.replace(hardware.attention, asked="under test", plugins=own)
