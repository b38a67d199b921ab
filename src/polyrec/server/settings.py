"""The server's settings, each declared once: the flags of `polyrec serve` and their limits. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from ..core.config import Settings
from ..core.errors import ConfigError
from ..core.request import ScoreRule
from ..hardware.base.config import HardwareConfig
from ..kvcache.options import KVConfig
from ..models.options import ModelOptions

LogLevel = Literal["debug", "info", "warning", "error"]
NO_KEY_HOSTS = ("127.0.0.1", "localhost")


class ServerSettings(Settings):
    """host, port: where to listen (port 0: the system picks). api_key: asked of every /v1 and /metrics request.

    max_queue: requests that may wait; one more gets 429. max_beam_width: largest n and beam_width of a request.
    max_batch, max_batch_tokens: requests and prompt tokens in one engine batch. eager: without recorded graphs.
    timeout: seconds a request may take, from its first byte to its answer.
    max_body_bytes: largest request body.
    score_rule: what a score is (core.request.ScoreRule). kv: the key-value cache's flags. model: the model flags.
    hardware: the hardware flags.
    http_workers: processes that speak HTTP beside the engine's; 0: the engine's own does; None: see `loading.num_http_workers`.
    num_threads: CPU threads of the engine (None: torch's choice). profile_dir: where traces go; None: none may be taken.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: SecretStr | None = None
    max_queue: int = Field(default=256, ge=1)
    max_beam_width: int = Field(default=1024, ge=1)
    max_batch: int = Field(default=32, ge=1)
    max_batch_tokens: int = Field(default=16_384, ge=1)
    eager: bool = False
    timeout: float = Field(default=30.0, gt=0, le=3600, allow_inf_nan=False)
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    log_level: LogLevel = "info"
    score_rule: ScoreRule = "level"
    kv: KVConfig = KVConfig()
    model: ModelOptions = ModelOptions()
    hardware: HardwareConfig = HardwareConfig()
    http_workers: int | None = Field(default=None, ge=0, le=64)
    num_threads: int | None = Field(default=None, ge=1)
    profile_dir: Path | None = None

    @model_validator(mode="after")
    def _open_address_needs_a_key(self) -> ServerSettings:
        key = self.api_key.get_secret_value() if self.api_key is not None else None
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip()):
            raise ConfigError(
                "api_key_invalid",
                "The API key is empty, or has characters that a header cannot carry.",
                "Use printable ASCII without spaces at the ends, for example the output of `openssl rand -hex 32`.",
            )
        if key is None and self.host not in NO_KEY_HOSTS:
            raise ConfigError(
                "api_key_required",
                f"Listening on {self.host} lets other machines ask, and no API key is set.",
                "Give --api-key (or POLYREC_API_KEY), or stay on --host 127.0.0.1.",
            )
        return self
