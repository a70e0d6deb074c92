"""Tiny models and servers that the engine's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.scripted_support import ENGINES, make_script
from tests.engine.scripted_support import Server as ClientServer
from tests.engine.support import Reference, Server, make_adapter, make_model

SCRIPT = [{"ids": list(range(40, 40 + n))} for n in (24, 30, 40)]


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


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(
    request: pytest.FixtureRequest, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientServer]:
    """A server whose weights no test changes for good: every test loads versions of its own."""
    tmp = tmp_path_factory.mktemp(request.param)
    args = ("--script", str(make_script(tmp, *SCRIPT))) if request.param == "scripted" else ()
    server = ClientServer(tmp, qwen3, *args, module=ENGINES[request.param])
    yield server
    server.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tmp = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tmp / str(i), seed=i) for i in range(4)]


@pytest.fixture
def scripted(qwen3: Path, tmp_path: Path) -> Iterator["Scripted"]:
    """Starts scripted servers with options of the test's own."""
    started = Scripted(qwen3, tmp_path)
    yield started
    for server in started.servers:
        if server.process.poll() is None:
            server.close()


class Scripted:
    def __init__(self, model: Path, tmp: Path) -> None:
        self._model, self._tmp = model, tmp
        self.servers: list[ClientServer] = []

    def __call__(self, *args: str, port: int = 0) -> ClientServer:
        script = make_script(self._tmp, *SCRIPT)
        self.servers.append(ClientServer(self._tmp, self._model, "--script", str(script), *args, port=port))
        return self.servers[-1]
