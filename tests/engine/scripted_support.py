"""Children and values that the tests of the client share. Importing it imports no torch."""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from claw_train.children import thread_env
from claw_train.config import EngineConfig
from claw_train.serving.client import EngineClient
from claw_train.types import GenerateRequest, Sampling, Version, WeightKind, WeightRef

T = TypeVar("T")

KEY = "a-test-key"
BASE = Version("main", 0, 0)
PROMPT = (5, 9, 7, 31)
ENGINES = {"scripted": "claw_train.engine.scripted", "embedded": "claw_train.engine"}


class Server:
    """An engine server child; `module` is the scripted or the embedded one."""

    def __init__(self, tmp: Path, model: Path, *args: str, module: str = "claw_train.engine.scripted", port: int = 0):
        port_file = tmp / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, "--model", str(model), "--port-file", str(port_file)]
        command += ["--key-env", "TEST_KEY", "--weight-version", str(BASE), "--port", str(port), "--dtype", "float32"]
        environment = {**os.environ, **thread_env(1), "TEST_KEY": KEY}
        self.log = tmp / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *args], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + 90
        while not port_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.01)
        self.port = int(port_file.read_text())
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        self.wait(lambda info: True, "answers")

    def info(self) -> dict[str, Any]:
        return self._http.get("/server_info").json()

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Polls `/server_info` until `condition` holds."""
        deadline = time.monotonic() + 60
        while True:
            try:
                info = self.info()
            except httpx.TransportError:
                info = {}
            if info and condition(info):
                return info
            assert time.monotonic() < deadline, f"{what}: {info}"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None
        self._http.close()
        self.process.stdin.close()
        self.process.wait(timeout=20)


def make_script(folder: Path, *replies: object, **fields: object) -> Path:
    file = folder / "script.json"
    file.write_text(json.dumps({"replies": list(replies), **fields}))
    return file


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"kind": "scripted", "timeout_s": 20.0, "retries": 2, **fields})


def run(url: str, work: Callable[[EngineClient], Awaitable[T]], **fields: Any) -> T:
    """Does `work` with a client of the server at `url`."""
    if fields.get("kind") == "url":
        fields["url"] = url

    async def main() -> T:
        client = EngineClient(url, KEY, config(**fields), base=BASE)
        try:
            async with asyncio.timeout(60):
                return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(main())


def ask(rid: str = "term/1/0/0", **fields: Any) -> GenerateRequest:
    """A request; sampling fields are told apart by name."""
    own = {k: fields.pop(k) for k in ("prompt_ids", "version", "live") if k in fields}
    sampling = Sampling(**{"seed": 3, "max_new_tokens": 24, **fields})
    return GenerateRequest(**{"id": rid, "prompt_ids": PROMPT, "sampling": sampling, **own})


def adapter_ref(folder: Path, step: int) -> WeightRef:
    """The reference of an adapter folder that exists."""
    checksum = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    return WeightRef(version=Version("main", 0, step), kind=WeightKind.LORA, path=str(folder), checksum=checksum)


def full_ref(folder: Path, step: int) -> WeightRef:
    """The reference of a model folder."""
    return WeightRef(version=Version("main", 0, step), kind=WeightKind.FULL, path=str(folder), checksum="")


def held(engine: Server, start: str) -> list[str]:
    """Versions of the adapters on the server whose names begin with `start`."""
    return [name.rsplit("-", 1)[0] for name in engine.info()["loaded_adapters"] if name.startswith(start)]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
