"""`polyrec serve FOLDER`: flags to settings, then the server's process."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..core.request import SCORE_HELP, ScoreRule
from ..hardware.base.config import HardwareConfig
from ..kvcache.options import KVConfig
from ..models.options import ModelOptions
from .hardware_flags import hardware_flags
from .kv_flags import kv_flags
from .model_flags import model_flags


class LogLevel(str, Enum):
    """Log levels, most talkative first."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@hardware_flags
@model_flags
@kv_flags
def serve(
    folder: Annotated[Path, typer.Argument(help="A model folder written by `polyrec train`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one and prints it.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="POLYREC_API_KEY", show_default=False, help="Key that requests must carry."),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more is answered 429.")] = 256,
    max_beam_width: Annotated[int, typer.Option(help="Largest n and beam_width of a request.")] = 1024,
    max_batch: Annotated[int, typer.Option(help="Most requests in one engine batch.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(help="Most prompt tokens in one engine batch.")] = 16_384,
    eager: Annotated[
        bool, typer.Option("--eager", help="Record no graphs where the platform could: slower, for finding faults.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take before it is answered 504.")] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="Logs are JSON lines on standard error.")] = LogLevel.info,
    score_rule: Annotated[ScoreRule, typer.Option(help=SCORE_HELP)] = "level",
    http_workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that speak HTTP; 0: the engine's own. Default: by the machine.", show_default=False
        ),
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.", show_default=False)] = None,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Take profiles when POST /v1/profile/start asks, and write them here.")
    ] = None,
    *,
    kv: KVConfig,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Serve recommendations over HTTP.

    Standard output gets {"url": …, "stage": "loading"} when the port is open and "ready" when requests are answered.
    SIGTERM or Ctrl-C finishes the requests in flight, then ends.
    """
    from ..core.config import make_settings
    from ..server.launch import run_server
    from ..server.logs import configure_logs
    from ..server.settings import ServerSettings

    values = {
        "host": host,
        "port": port,
        "api_key": api_key,
        "max_queue": max_queue,
        "max_beam_width": max_beam_width,
        "max_batch": max_batch,
        "max_batch_tokens": max_batch_tokens,
        "eager": eager,
        "timeout": timeout,
        "log_level": log_level.value,
        "score_rule": score_rule,
        "kv": kv,
        "model": options,
        "hardware": hardware,
        "http_workers": http_workers,
        "num_threads": num_threads,
        "profile_dir": profile_dir,
    }
    settings = make_settings(ServerSettings, values, where="polyrec serve")
    configure_logs(settings.log_level)  # before the hardware is chosen, whose warnings are log lines too
    run_server(folder, settings)
