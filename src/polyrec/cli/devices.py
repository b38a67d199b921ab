"""`polyrec devices`: which platforms exist, which are usable and why the others are not, and what the chosen one runs."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from ..hardware.base.config import HardwareConfig
from .hardware_flags import hardware_flags


@hardware_flags
def devices(
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON on standard output.")] = False,
    *,
    hardware: HardwareConfig,
) -> None:
    """Show platforms, devices and operations: what runs where, and why something does not.

    Exit code 2 when the flags name what cannot be used; without flags, a machine without a usable platform is no error.
    """
    from .device_report import make_report
    from .device_tables import show_report

    with redirect_stdout(sys.stderr):  # vendors' libraries may print while they are imported or asked
        report = make_report(hardware)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show_report(report)
    if report["error"] is not None and hardware != HardwareConfig():
        raise typer.Exit(2)
