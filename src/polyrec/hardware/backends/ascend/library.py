"""The one place that imports torch_npu, and only when a backend is built: its shared libraries need CANN on the machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ....core.errors import HardwareError

NAME = "torch_npu"


def load_library(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """torch_npu, which registers the device type `npu` with torch when it is first imported.

    Errors: `ascend_library_missing`; `ascend_import_failed`, whose cause is kept (mostly a library of CANN that is not found).
    """
    try:
        return load(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise _import_failed(error) from error
        raise HardwareError(
            "ascend_library_missing",
            "Platform 'ascend' runs through torch_npu, which is not installed.",
            "Install the torch_npu whose version begins like that of torch.",
        ) from error
    except Exception as error:  # it loads CANN, and refuses a second accelerator with a RuntimeError
        raise _import_failed(error) from error


def _import_failed(error: Exception) -> HardwareError:
    return HardwareError(
        "ascend_import_failed",
        f"torch_npu is installed, and importing it failed: {type(error).__name__}: {error}.",
        "Source CANN's set_env.sh before the start, and check that CANN, torch and torch_npu fit together.",
    )
