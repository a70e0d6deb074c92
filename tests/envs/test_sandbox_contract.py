"""Every backend is held to one contract."""

import pytest

from claw_envs.errors import SandboxError, SandboxUnavailable
from claw_envs.sandbox import contract, factory
from claw_envs.sandbox.base import Limits, Sandbox
from claw_envs.sandbox.factory import open_sandbox, probe
from claw_envs.sandbox.fake import FakeSandbox
from claw_envs.sandbox.local import LocalSandbox
from claw_envs.sandbox.namespace import NamespaceSandbox


@pytest.mark.sandbox
def test_namespace_sandbox_keeps_the_contract():
    contract.check_sandbox(NamespaceSandbox)


def test_local_sandbox_keeps_the_contract():
    contract.check_sandbox(lambda: LocalSandbox(unsafe=True))


def test_fake_sandbox_closes_by_the_contract():
    contract.check_close(FakeSandbox)


def test_the_contract_notices_a_broken_backend():
    class Chatty(FakeSandbox):
        def close(self) -> None:
            """Forgets to close."""

    with pytest.raises(AssertionError, match="closed sandbox answered"):
        contract.check_close(Chatty)


@pytest.mark.sandbox
def test_auto_opens_an_isolated_backend_with_the_limits_asked_for():
    sandbox = open_sandbox("auto", Limits(output_bytes=10))
    try:
        assert isinstance(sandbox, Sandbox)
        assert sandbox.capabilities.isolated
        assert sandbox.exec("echo 0123456789abcdef", timeout_s=10).stdout == b"01234cdef\n"
    finally:
        sandbox.close()


@pytest.mark.parametrize(("backend", "words"), [("local", "unsafe=True"), ("dokcer", "known are auto, namespace")])
def test_open_sandbox_refuses(backend, words):
    with pytest.raises(ValueError, match=words):
        open_sandbox(backend)


def test_local_must_be_asked_for():
    with pytest.raises(ValueError, match="unsafe=True"):
        LocalSandbox()


@pytest.mark.sandbox
def test_probe_reports_every_backend():
    report = probe()
    assert set(report) == {"namespace", "local"}
    assert report["namespace"].usable
    assert "bubblewrap" in report["namespace"].detail
    local = report["local"].capabilities
    assert local is not None
    assert not local.isolated


def test_probe_says_why_a_backend_does_not_run(monkeypatch):
    def refuse() -> None:
        raise SandboxUnavailable("bubblewrap is not installed: run scripts/system-packages")

    monkeypatch.setattr("claw_envs.sandbox.launcher.get_launcher", refuse)
    found = factory.probe()["namespace"]
    assert (found.usable, found.capabilities) == (False, None)
    assert "scripts/system-packages" in found.detail


@pytest.mark.sandbox
def test_a_frozen_sandbox_runs_no_commands():
    with NamespaceSandbox() as sandbox:
        sandbox.freeze()
        sandbox.freeze()
        with pytest.raises(SandboxError, match="frozen"):
            sandbox.exec("true", timeout_s=1)
