"""From a model folder to a service that answers: the stages that /ready tells, in order. Only this file loads torch."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import CheckpointError
from ..core.request import RecommendRequest
from .chat import ChatPrompt, load_template
from .settings import ServerSettings
from .state import ServerState, Service

NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "catalog.parquet")


def check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be served, before a port is opened."""
    if not folder.is_dir():
        raise CheckpointError("model_missing", f"No model folder at {folder}.", "Train one with `polyrec train`.")
    if missing := [name for name in NEEDED_FILES if not (folder / name).is_file()]:
        raise CheckpointError(
            "model_incomplete",
            f"{folder} lacks {', '.join(missing)}.",
            "Serve a folder written by `polyrec train`.",
        )


def load_service(folder: Path, settings: ServerSettings, state: ServerState) -> Service:
    """Loads the model, starts its engine thread and has it answer one request, telling each stage in `state`."""
    state.stage = "importing"
    import torch

    from ..engine.loop import EngineLoop
    from ..engine.recommender import Recommender

    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    state.stage = "loading_model"
    recommender = Recommender.from_pretrained(folder)
    chat = ChatPrompt(recommender.tokenizer, recommender.layout, load_template(folder))
    state.stage = "warming_up"
    loop = EngineLoop(recommender, max_queue=settings.max_queue)
    loop.start()
    first_item = recommender.catalog.item_ids[0]
    loop.submit(RecommendRequest(history=[first_item], n=1)).result()
    return Service(loop, recommender.layout, chat)
