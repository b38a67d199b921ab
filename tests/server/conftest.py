"""One server around the fake engine for the tests that only ask it questions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parent))  # helper modules beside these tests

from processes import WORKERS, ServerProcess, fake_server


@pytest.fixture(scope="session", params=WORKERS, ids=["here", "workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served") / "my-model"
    folder.mkdir()
    with fake_server(folder, max_queue=64, timeout=30, log_level="debug", http_workers=request.param) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as open_client:
        yield open_client
