"""Validation during training: the model as it is, through the same engine that serves it."""

from __future__ import annotations

import numpy as np

from ..data.histories import EvalSet, eval_set
from ..engine.engine import EngineConfig
from ..engine.folder import ModelFolder
from ..engine.recommender import Recommender
from ..engine.scheduler import BatchLimits
from ..evaluation.metrics import per_user_metrics
from ..evaluation.run import BEAM_WIDTH, draw_users
from ..hardware.base.backend import HardwareBackend
from ..kvcache.options import KVConfig
from ..models.spec import Decoder
from .prepared import PreparedData
from .recipe import TrainConfig

K = 10


class Validator:
    """NDCG@10 over validation users, drawn once by the seed."""

    def __init__(self, model: Decoder, data: PreparedData, config: TrainConfig, backend: HardwareBackend) -> None:
        asked = eval_set(data.histories, "validation", only_new=config.eval_only_new)
        self._asked: EvalSet = draw_users(asked, config.eval_users, config.seed)
        self._mask_seen = config.eval_only_new
        folder = ModelFolder(
            data.path, data.tokenizer, data.layout, data.catalog, config.prompt, data.histories.kind, None
        )
        # Keys and values of a prompt change with the weights; and most of the memory is training's.
        modest = EngineConfig(limits=BatchLimits(max_tokens=4096), kv=KVConfig(prefix_cache=False))
        self._recommender = Recommender(model, folder, backend, modest)
        self._model = model

    def __len__(self) -> int:
        return len(self._asked)

    def ndcg(self) -> float:
        """The mean NDCG@10 of the model as it is now; NaN when there is nobody to ask."""
        if len(self._asked) == 0:
            return float("nan")
        self._model.eval()
        ranked = self._recommender.rank_rows(self._asked, K, self._mask_seen, BEAM_WIDTH)
        self._model.train()
        return float(np.mean(per_user_metrics(ranked, self._asked, (K,))[f"NDCG@{K}"]))
