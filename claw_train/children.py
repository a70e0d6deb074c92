"""Child processes: started with their share of threads, watched, ended with everything they started.

A child holds a pipe to us as its standard input and ends itself when that closes, so nothing outlives a SIGKILL of the
parent (`watch_parent`, called first thing by every child main). Thread counts are set in the environment before the
child imports torch: two torch processes with default threads and active waiting slow each other down 13 times.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from claw_train.errors import ChildError

logger = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 4000


def thread_env(threads: int) -> dict[str, str]:
    """Environment that gives a torch process `threads` threads that sleep while they wait."""
    n = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def watch_parent() -> None:
    """Ends this process and what it started as soon as its standard input closes, that is, when the parent is gone."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start one child."""

    name: str
    module: str
    """Run as `python -m module`."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to ours; keys and secrets go here, never into `args`."""
    log: Path
    """Both output streams are appended here."""
    threads: int = 1


class Child:
    """A running child process."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, *, log_start: int = 0) -> None:
        self.spec = spec
        self._process = process
        self._log_start = log_start
        self._stopped = False

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Starts it in a process group of its own.

        Raises:
            ChildError: it could not be started at all.
        """
        # Unbuffered, so that the log holds a dying child's last words, and in their order.
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **thread_env(spec.threads), **spec.env}
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            with spec.log.open("ab") as log:
                log_start = log.tell()
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    spec.module,
                    *spec.args,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
        except OSError as error:
            raise ChildError(f"{spec.name} could not be started: {error}") from error
        logger.info("started %s, pid %d", spec.name, process.pid)
        return cls(spec, process, log_start=log_start)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for its end."""
        return await self._process.wait()

    async def wait_ready(self, probe: Callable[[], Awaitable[bool]], *, timeout_s: float) -> None:
        """Polls `probe` until it is true.

        Raises:
            ChildError: the child ended or was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await probe():
                    if self.returncode is not None:
                        break
                    await asyncio.sleep(0.05)
                else:
                    return
        except TimeoutError:
            raise ChildError(f"{self.spec.name} was not ready after {timeout_s:.0f} s: {self.last_words()}") from None
        raise ChildError(f"{self.spec.name} ended with status {self.returncode} at start: {self.last_words()}")

    def last_words(self) -> str:
        """The last line it logged since this start, and where the rest is."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as log:
            log.seek(max(self._log_start, self.spec.log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            if lines:
                return f"{lines[-1].strip()} (log: {self.spec.log})"
        return f"no output (log: {self.spec.log})"

    async def stop(self, grace_s: float = 5.0) -> None:
        """TERM, then after `grace_s` seconds KILL, of its whole group. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if self.returncode is not None:
                break
            self._signal_group(sig)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        # Grandchildren may outlive their parent; the group id is still ours as long as one of them lives.
        self._signal_group(signal.SIGKILL)
        # Only now: a child that watches its parent would take a closed input for our death and skip its farewell.
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal_group(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sig)
