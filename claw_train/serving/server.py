"""The engine server as our child: started, watched, restarted within its budget.

In: the engine's configuration and a model folder. Out: a URL and a key for the client. A server that was given by URL
is not ours: it is neither started nor stopped.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from claw_train.children import Child, ChildSpec
from claw_train.config import EngineConfig
from claw_train.errors import ChildError, ConfigError

logger = logging.getLogger(__name__)

KEY_ENV = "CLAW_ENGINE_KEY"
_MODULES = {"embedded": "claw_train.engine", "scripted": "claw_train.engine.scripted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Everything a server is started with."""

    config: EngineConfig
    model: Path
    context: int
    max_lora_rank: int
    base_version: str
    seed: int
    threads: int
    work: Path
    """Folder for the port file and the log."""


def _script_args(config: EngineConfig) -> list[str]:
    script = ["--script", config.script] if config.script else []
    return script + [text for fault in config.faults for text in ("--fault", fault)]


def server_key(config: EngineConfig) -> str | None:
    """The key of a server given by URL; None for one on this machine that needs none.

    Raises:
        ConfigError: no key for a server elsewhere, where anybody could answer and listen.
    """
    key = os.environ.get(config.api_key_env)
    if key:
        return key
    host = urlsplit(config.url or "").hostname or ""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return None
    raise ConfigError(
        f"engine.url={config.url} is not on this machine: set the environment variable {config.api_key_env} "
        "(engine.api_key_env) to its key"
    )


class EngineServer:
    """One server; a context manager that leaves nothing behind.

    Raises:
        ConfigError: `server_key`.
    """

    def __init__(self, launch: EngineLaunch) -> None:
        self._launch = launch
        self._child: Child | None = None
        self._port = launch.config.port
        self.restarts = 0
        self.key = server_key(launch.config) if launch.config.kind == "url" else secrets.token_urlsafe(32)

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._launch.config.url or f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> "EngineServer":
        if self._launch.config.kind != "url":
            try:
                await self._start()
            except BaseException:
                await self._stop()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        if self._child is not None:
            await self._child.stop()

    async def _start(self) -> None:
        launch, config = self._launch, self._launch.config
        assert self.key is not None
        port_file = launch.work / "engine.port"
        port_file.unlink(missing_ok=True)
        args = {
            "--model": launch.model,
            "--host": "127.0.0.1",
            "--port": self._port,
            "--port-file": port_file,
            "--dtype": config.dtype,
            "--max-running": config.max_running,
            "--max-total-tokens": config.max_total_tokens,
            "--context": launch.context,
            "--key-env": KEY_ENV,
            "--weight-version": launch.base_version,
            "--seed": launch.seed,
            "--max-lora-rank": launch.max_lora_rank,
        }
        self._child = await Child.start(
            ChildSpec(
                name="engine server",
                module=_MODULES[config.kind],
                args=(*(str(x) for pair in args.items() for x in pair), *_script_args(config)),
                env={KEY_ENV: self.key},
                log=launch.work / "engine.log",
                threads=launch.threads,
            )
        )
        await self._child.wait_ready(lambda: self._ready(port_file), timeout_s=config.start_timeout_s)

    async def _ready(self, port_file: Path) -> bool:
        if not port_file.is_file():
            return False
        text = port_file.read_text().strip()
        if not text:
            return False
        self._port = int(text)
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
                return (await client.get(f"{self.url}/health")).status_code == 200
        return False

    async def watch(self) -> None:
        """Restarts the server when it dies, on the same port; runs until cancelled. The client gives it its weights.

        Raises:
            ChildError: it died more often than `engine.restarts` allows.
        """
        if self._child is None:
            await asyncio.Event().wait()
        while True:
            assert self._child is not None
            status = await self._child.wait()
            if self.restarts >= self._launch.config.restarts:
                raise ChildError(
                    f"engine server ended ({status}) after {self.restarts} restarts: {self._child.last_words()}"
                )
            self.restarts += 1
            logger.warning("engine server ended with status %d: restart %d", status, self.restarts)
            await self._child.stop()
            await self._start()

    @property
    def pid(self) -> int | None:
        """Process id of our child; None for a server given by URL."""
        return self._child.pid if self._child else None
