"""What all tests share: thread counts, markers that skip by name of what is missing, and a watch for leftovers."""

import os
import shutil
import sys
from collections.abc import Iterator

import psutil
import pytest

# Before any test imports torch: two torch processes with default threads slow each other down many times.
for _name, _value in {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
    os.environ.setdefault(_name, _value)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("CLAW_CRASH_AT", None)


def _missing(marker: str) -> str | None:
    """Why tests of `marker` cannot run here; None when they can."""
    if marker == "sandbox":
        return None if shutil.which("bwrap") else "bubblewrap is not installed: run scripts/system-packages"
    if marker == "docker":
        socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        return None if os.path.exists(socket) or "://" in socket else "no Docker engine"  # noqa: PTH110
    if marker == "gpu":
        return None if shutil.which("nvidia-smi") else "no NVIDIA GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests whose marker names something this machine lacks."""
    for marker in ("sandbox", "docker", "gpu"):
        reason = _missing(marker)
        if reason is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Every process that the tests started has ended when they have."""
    yield
    if (launcher := sys.modules.get("claw_envs.sandbox.launcher")) is not None:
        launcher.close_launcher()  # ends with this process anyway
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    _, alive = psutil.wait_procs(children, timeout=5)
    left = [" ".join(p.cmdline()) for p in alive]
    # Python's own bookkeeper of shared memory lives as long as its interpreter.
    assert not [line for line in left if "resource_tracker" not in line]
