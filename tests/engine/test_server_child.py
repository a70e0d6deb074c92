"""The engine server as a run sees it: started by us or given by URL, and with which key."""

import asyncio
from pathlib import Path

import pytest

from claw_train.config import EngineConfig
from claw_train.errors import ConfigError
from claw_train.serving.server import EngineLaunch, EngineServer, server_key

KEY_ENV = "CLAW_TEST_ENGINE_KEY"
PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def launch(model: Path, work: Path, **fields: object) -> EngineLaunch:
    return EngineLaunch(
        config=EngineConfig(**{"kind": "scripted", "start_timeout_s": 40.0, **fields}),  # type: ignore[arg-type]
        model=model,
        context=512,
        max_lora_rank=8,
        base_version="main-0-0",
        seed=0,
        threads=1,
        work=work,
    )


def given(url: str) -> EngineConfig:
    return EngineConfig(kind="url", url=url, api_key_env=KEY_ENV)


def test_a_proxy_of_the_environment_does_not_come_between(qwen3, tmp_path, monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def main() -> int | None:
        async with EngineServer(launch(qwen3, tmp_path)) as server:
            return server.pid

    assert asyncio.run(main())


def test_a_server_given_by_url_is_not_started(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_ENV, raising=False)

    async def main() -> tuple[str, int | None]:
        config = {"kind": "url", "url": "http://127.0.0.1:1", "api_key_env": KEY_ENV}
        async with EngineServer(launch(tmp_path / "nothing", tmp_path, **config)) as server:
            return server.url, server.pid

    assert asyncio.run(main()) == ("http://127.0.0.1:1", None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:30000", "http://[::1]:9", "http://127.8.0.1"])
def test_a_server_on_this_machine_needs_no_key(url, monkeypatch):
    monkeypatch.delenv(KEY_ENV, raising=False)
    assert server_key(given(url)) is None


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("url", ["http://gpu:30000", "http://10.0.0.7:30000", "http://localhost.example"])
def test_a_server_elsewhere_needs_one(url, value, monkeypatch):
    monkeypatch.delenv(KEY_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(KEY_ENV, value)
    with pytest.raises(ConfigError, match=rf"{KEY_ENV} \(engine\.api_key_env\)"):
        server_key(given(url))


@pytest.mark.parametrize("url", ["http://gpu:30000", "http://127.0.0.1:1"])
def test_the_environment_gives_the_key(url, monkeypatch):
    monkeypatch.setenv(KEY_ENV, "secret")
    assert server_key(given(url)) == "secret"
