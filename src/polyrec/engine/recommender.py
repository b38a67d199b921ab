"""From a user's history to recommended items: engine and front in one object, for Python callers, files and evaluation."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.config import make_settings
from ..core.errors import CheckpointError, ConfigError
from ..core.request import Recommendation, RecommendRequest
from ..data.histories import EvalSet
from ..data.prompt import PromptBuilder
from ..hardware import HardwareBackend, HardwareConfig, get_hardware_backend
from ..hardware.base.config import Fallback, Verify
from ..models.checkpoint import load_model
from ..models.options import Dtype, ModelOptions, Quantization
from ..models.spec import Decoder
from ..sid.trie import MAX_COMPLETE_LEAVES, complete_trie
from .engine import Engine, EngineConfig
from .folder import ModelFolder, read_folder
from .front import EngineFacts, Front, Prepared
from .history import row_of
from .memory import check_fits, longest_prompt
from .searches import SearchRequest, SearchResult

Progress = Callable[[int], None]


def choose_backend(backend: HardwareBackend | None, flags: Mapping[str, Any]) -> HardwareBackend:
    """The backend given, or this process's for the hardware flags that were given. Errors: `backend_given_twice`, and those of
    `get_hardware_backend`."""
    if backend is None:
        return get_hardware_backend(make_settings(HardwareConfig, dict(flags), "hardware") if flags else None)
    if flags:
        raise ConfigError(
            "backend_given_twice",
            f"backend= is a '{backend.platform_name}' backend built already, and {', '.join(flags)} would build another.",
            "Give one or the other.",
        )
    return backend


def load_decoder(path: str | Path, contents: ModelFolder, backend: HardwareBackend, config: EngineConfig) -> Decoder:
    """A checkpoint for an engine of that configuration, which is refused before its weights are read where they and one longest
    prompt do not fit the device. Errors: those of `check_fits` and `load_model`."""
    check = functools.partial(check_fits, backend=backend, config=config.kv, depth=contents.layout.depth)
    return load_model(path, backend, options=config.model, before_weights=check)


class Recommender:
    """A trained model with its catalog, ready to answer. Calls from several threads are served one after another."""

    def __init__(
        self, model: Decoder, folder: ModelFolder, backend: HardwareBackend, config: EngineConfig | None = None
    ) -> None:
        self.catalog = folder.catalog
        self.layout = folder.layout
        self.tokenizer = folder.tokenizer
        self.kind = folder.kind
        self._model = model
        self._backend = backend
        self._config = config or EngineConfig()
        self.score_rule = self._config.score_rule
        longest = PromptBuilder(folder.layout, folder.prompt).max_tokens
        most = model.config.max_position_embeddings - folder.layout.depth
        if longest > most:  # else long histories would run past them unseen
            raise CheckpointError(
                "positions_too_few",
                f"{folder.path}: histories of {folder.prompt.max_items} items make prompts of {longest} "
                f"tokens, the model takes {most}.",
                "Use a model with more max_position_embeddings, or train with a lower prompt.max_items.",
            )
        trie = folder.catalog.trie
        self.engine = Engine(model, folder.layout, trie, backend, self._config)
        name, size = backend.runtime.device_name(), model.config.vocab_size
        facts = EngineFacts(self.score_rule, self.max_prompt_tokens, size, trie.num_leaves, name)
        self.front = Front.of_folder(folder, facts)
        self.lock = threading.Lock()  # held by whoever runs the engine

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        catalog: str | Path | None = None,
        device: str | None = None,
        hardware_platform: str | None = None,
        extra_ops: str | Sequence[str] = (),
        extra_att: str | Sequence[str] = (),
        op: str | Sequence[str] | Mapping[str, str] | None = None,
        attention: str | None = None,
        fallback: Fallback | None = None,
        verify_plugins: Verify | None = None,
        allow_cpu: bool | None = None,
        dtype: Dtype | None = None,
        quantization: Quantization | None = None,
        enable_fused_rms_fp8: bool | None = None,
        enable_fused_silu_fp8: bool | None = None,
        enable_fused_qk_rope_kv: bool | None = None,
        backend: HardwareBackend | None = None,
        config: EngineConfig | None = None,
    ) -> Recommender:
        """Loads a folder written by `polyrec train`. catalog: another catalog.parquet of the same codebooks.

        device … allow_cpu: what the flags of these names take (`HardwareConfig`); none of them: the hardware that this
        process runs on already, else auto. backend: a built one instead. The hardware is built before the folder is read.
        dtype … enable_fused_qk_rope_kv: `ModelOptions`, those given instead of the config's.
        Errors: those of `get_hardware_backend`; `backend_given_twice`.
        """
        flags = {
            "device": device,
            "hardware_platform": hardware_platform,
            "extra_ops": extra_ops or None,
            "extra_att": extra_att or None,
            "op": op or None,
            "attention": attention,
            "fallback": fallback,
            "verify_plugins": verify_plugins,
            "allow_cpu": allow_cpu,
        }
        backend = choose_backend(backend, {name: value for name, value in flags.items() if value is not None})
        own = {
            "dtype": dtype,
            "quantization": quantization,
            "enable_fused_rms_fp8": enable_fused_rms_fp8,
            "enable_fused_silu_fp8": enable_fused_silu_fp8,
            "enable_fused_qk_rope_kv": enable_fused_qk_rope_kv,
        }
        config = config or EngineConfig()
        options = config.model.model_dump() | {name: value for name, value in own.items() if value is not None}
        config = config.model_copy(update={"model": make_settings(ModelOptions, options, "the model's options")})
        contents = read_folder(folder, catalog)
        return cls(load_decoder(folder, contents, backend, config), contents, backend, config)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that is taken: what the model's positions allow, or `kv.max_length`."""
        return longest_prompt(self._model, self._config.kv, self.layout.depth)

    def row_of(self, item: str) -> int | None:
        """The catalog row of an item id or a SID, None when there is none."""
        return row_of(item, self.catalog, self.layout)

    def recommend(
        self,
        history: Sequence[str | Sequence[str]],
        n: int = 10,
        *,
        exclude: Sequence[str] = (),
        allow: Sequence[str] | None = None,
        exclude_seen: bool = False,
        **options: Any,
    ) -> Recommendation:
        """The n best items after `history` (item ids or SIDs, oldest first; a list inside is one basket).

        options: beam_width, unknown, cold, as in RecommendRequest.
        """
        request = RecommendRequest(
            history=history, n=n, exclude=exclude, allow=allow, exclude_seen=exclude_seen, **options
        )
        return self.recommend_batch([request])[0]

    async def recommend_async(self, request: RecommendRequest) -> Recommendation:
        """`recommend` without blocking the event loop. To batch concurrent callers, use `engine.loop.EngineLoop`."""
        return (await asyncio.to_thread(self.recommend_batch, [request]))[0]

    def recommend_batch(
        self, requests: Sequence[RecommendRequest], progress: Progress | None = None
    ) -> list[Recommendation]:
        """Answers many requests; progress is called with the number just answered."""
        return self.answer([self.prepare(request) for request in requests], progress)

    def answer(
        self, prepared: Sequence[Prepared | Recommendation], progress: Progress | None = None
    ) -> list[Recommendation]:
        """Runs what `prepare` returned; what it answered already stays as it is."""
        searches = [item for item in prepared if isinstance(item, Prepared)]
        with self.lock:
            results = iter(self.engine.run([item.search for item in searches], progress))
        return [item if isinstance(item, Recommendation) else self.finish(item, next(results)) for item in prepared]

    def prepare(self, request: RecommendRequest) -> Prepared | Recommendation:
        """Validates a request and builds its search; a cold history is answered at once by popularity. Errors: RequestError."""
        return self.front.prepare(request)

    def prepare_prompt(self, token_ids: Sequence[int], n: int, beam_width: int | None = None) -> Prepared:
        """A search from a ready prompt, which must end with `<|sid_begin|>`. Errors: RequestError."""
        return self.front.prepare_prompt(token_ids, n, beam_width)

    def finish(self, prepared: Prepared, result: SearchResult) -> Recommendation:
        """Leaves of the trie -> items with names and scores."""
        return self.front.finish(prepared, result)

    def prompt_of(self, rows: np.ndarray, baskets: np.ndarray) -> np.ndarray:
        """Token ids int64 [T] of a history: catalog rows int [H] and basket ordinals int [H]; the trainer builds the same."""
        return self.front.prompt_of(rows, baskets)

    def rank_rows(
        self,
        eval_set: EvalSet,
        k: int,
        mask_seen: bool,
        beam_width: int | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Full ranking for evaluation: int32 [N, k] catalog rows, best first, −1 where fewer are left."""
        width = max(beam_width or 0, k)
        searches = []
        for index in range(len(eval_set)):
            rows, baskets = eval_set.history(index)
            excluded = self.front.leaves_of(np.unique(rows)) if mask_seen else None
            searches.append(SearchRequest(self.prompt_of(rows, baskets), k, width, excluded))
        ranked = np.full((len(eval_set), k), -1, np.int32)
        with self.lock:
            results = self.engine.run(searches, progress)
        for index, result in enumerate(results):
            ranked[index, : len(result.leaves)] = self.engine.trie.rows[result.leaves]
        return ranked

    def unconstrained_invalid_rate(
        self, eval_set: EvalSet, k: int, beam_width: int | None = None, progress: Progress | None = None
    ) -> float | None:
        """Share of the k best SIDs that name no item when the beams are free of the catalog: what the trie saves.

        None where the codebooks allow too many SIDs to search them all (catalogs from about 180,000 items on).
        """
        if math.prod(self.layout.codebook_sizes) > MAX_COMPLETE_LEAVES:
            return None
        trie = complete_trie(self.layout.codebook_sizes)
        own = self._config.kv.model_copy(update={"memory_fraction": None})  # the other engine has its share already
        config = self._config.model_copy(update={"kv": own})
        engine = Engine(self._model, self.layout, trie, self._backend, config)
        searches = []
        for index in range(len(eval_set)):
            prompt = self.prompt_of(*eval_set.history(index))
            searches.append(SearchRequest(prompt, k, max(beam_width or 0, k)))
        with self.lock:
            results = engine.run(searches, progress)
        leaves = np.concatenate([result.leaves for result in results])
        codes = np.stack(np.unravel_index(leaves, self.layout.codebook_sizes), axis=1)
        return float(np.mean([self.catalog.row_of_codes(sid) is None for sid in codes]))
