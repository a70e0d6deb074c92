"""Tiny models and servers that the engine's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.support import Reference, Server, make_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=1)


@pytest.fixture(scope="session")
def qwen3_later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_model(tmp_path_factory.mktemp("later"), "qwen3", seed=2)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.fixture(scope="session")
def server(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server shared by tests that leave its weights as they are."""
    running = Server(tmp_path_factory.mktemp("server"), qwen3, "--max-running", "16", "--max-total-tokens", "20000")
    yield running
    running.close()


@pytest.fixture(scope="session")
def reference(qwen3: Path) -> Reference:
    return Reference(qwen3)
