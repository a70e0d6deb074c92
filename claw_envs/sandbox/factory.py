"""Choosing a backend by name or by what this machine can run.

In: a backend's name and limits. Out: a started `Sandbox`, or a report of what can run here and why the rest cannot.
Importing a backend happens here, at the call, so that nothing optional is needed to import the package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from claw_envs.errors import SandboxError, SandboxUnavailable
from claw_envs.sandbox.base import Capabilities, Limits, Sandbox


class Backend(StrEnum):
    """What `open_sandbox` knows."""

    AUTO = "auto"
    """The best isolated backend that runs here; never `local`."""
    NAMESPACE = "namespace"
    LOCAL = "local"
    """No isolation: commands run on this machine as you. Opened by `LocalSandbox(unsafe=True)` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Whether one backend runs here."""

    usable: bool
    detail: str
    """How it runs, or what is missing and how to get it."""
    capabilities: Capabilities | None = None
    """What it enforces; None when it does not run."""


def open_sandbox(backend: str = "auto", limits: Limits | None = None) -> Sandbox:
    """Starts a sandbox.

    Args:
        backend: `auto` or `namespace`.
        limits: resources; None takes the defaults of `Limits`.

    Raises:
        ValueError: there is no such backend, or it is `local`, which must be asked for in code.
        SandboxUnavailable: it cannot run here; the message names what is missing.
    """
    known = [name.value for name in (Backend.AUTO, Backend.NAMESPACE)]
    if backend == Backend.LOCAL:
        raise ValueError("backend 'local' isolates nothing; use LocalSandbox(unsafe=True) if you mean it")
    if backend not in known:
        raise ValueError(f"unknown sandbox backend {backend!r}; known are {', '.join(known)}")
    from claw_envs.sandbox.namespace import NamespaceSandbox

    return NamespaceSandbox(limits)


def probe() -> Mapping[str, Probe]:
    """Starts one sandbox per backend and says what came of it. Takes some 0.2 s."""
    return {Backend.NAMESPACE.value: _probe_namespace(), Backend.LOCAL.value: _probe_local()}


def _probe_namespace() -> Probe:
    from claw_envs.sandbox.launcher import get_launcher
    from claw_envs.sandbox.namespace import NamespaceSandbox

    try:
        detail = get_launcher().ping()
        with NamespaceSandbox() as sandbox:
            answer = sandbox.exec("echo works", timeout_s=10.0)
            if answer.stdout != b"works\n":
                return Probe(usable=False, detail=f"a first command answered {answer}")
            return Probe(usable=True, detail=detail, capabilities=sandbox.capabilities)
    except SandboxUnavailable as error:
        return Probe(usable=False, detail=str(error))
    except SandboxError as error:
        return Probe(usable=False, detail=f"{type(error).__name__}: {error}")


def _probe_local() -> Probe:
    nothing = Capabilities(isolated=False, network_off=False, memory_limit=False, pids_limit=False, disk_limit=False)
    return Probe(usable=True, detail="no isolation; only on request (unsafe=True)", capabilities=nothing)
