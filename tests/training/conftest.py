"""A small prepared shop, and recipes that train on it in a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # helper modules beside these tests

from small_shop import SIZES, prepare_shop

from polyrec.core.config import make_settings
from polyrec.core.files import write_json
from polyrec.hardware import get_hardware_backend
from polyrec.training.prepared import PreparedData, read_prepared
from polyrec.training.recipe import TrainConfig


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder."""
    return prepare_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="session")
def data(shop: Path) -> PreparedData:
    return read_prepared(shop)


@pytest.fixture(scope="session")
def backend():
    return get_hardware_backend()


@pytest.fixture(scope="session")
def sizes_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json of a model with 16 hidden units."""
    path = tmp_path_factory.mktemp("sizes") / "config.json"
    write_json(path, SIZES)
    return path


@pytest.fixture
def recipe(sizes_file: Path):
    """recipe(**settings) -> TrainConfig of a few steps of that model."""

    def make(**settings: object) -> TrainConfig:
        values = {"model_config_file": str(sizes_file), "steps": 6, "eval_every": 0, "prompt": {"max_items": 8}}
        return make_settings(TrainConfig, {**values, "sampling": {"batch_size": 8}, **settings})

    return make
