"""`polyrec devices`: which platforms exist, which are usable and why the others are not, and what the chosen one runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..hardware.base.config import AUTO, HardwareConfig
from .hardware_flags import hardware_flags

# Faults of plugins and of the attention's name say nothing against the platform that the flags name.
NOT_THE_PLATFORM = ("plugin_", "attention_", "pin_")


@hardware_flags
def devices(
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON on standard output.")] = False,
    *,
    hardware: HardwareConfig,
) -> None:
    """Show platforms, devices and operations: what runs where, and why something does not.

    Exit code 2 when the flags name a platform or device that cannot be used.
    """
    from .device_report import make_report
    from .device_tables import show_report

    report = make_report(hardware)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show_report(report)
    named = hardware.hardware_platform != AUTO or hardware.device is not None
    error = report["error"]
    if named and error is not None and not error["code"].startswith(NOT_THE_PLATFORM):
        raise typer.Exit(2)
