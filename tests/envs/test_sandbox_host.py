"""The parts of the launcher that can be tried without one: groups, leases, processes, output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_envs.sandbox.host import cgroups, leases, mounts, procs
from claw_envs.sandbox.host.leases import Lease
from claw_envs.sandbox.host.mounts import Privacy
from claw_envs.sandbox.host.sandboxes import Host, Part, Request
from claw_envs.sandbox.output import HeadTail
from tests.helpers.sandboxes import until

DEAD = (2**22 - 1, 1)


@given(st.lists(st.binary(max_size=20)), st.integers(0, 12))
def test_head_and_tail_of_any_stream(chunks, limit):
    kept = HeadTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    whole = b"".join(chunks)
    expected = whole if len(whole) <= limit else whole[: limit // 2] + whole[len(whole) - (limit - limit // 2) :]
    assert kept.value() == expected
    assert (kept.total, kept.omitted) == (len(whole), len(whole) - len(expected))


# -- groups ---------------------------------------------------------------------------------------------------------


def unified(tmp_path: Path, own: str) -> cgroups.Parent:
    """A version 2 hierarchy of plain folders."""
    return cgroups.Parent(f"30 20 0:26 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n", f"0::{own}\n")


def test_version_2_uses_the_nearest_ancestor_that_hands_out_both_controllers(tmp_path):
    leaf = tmp_path / "user/app/leaf"
    leaf.mkdir(parents=True)
    for folder, enabled in {leaf: "", leaf.parent: "cpu memory pids", tmp_path: "memory pids"}.items():
        (folder / "cgroup.subtree_control").write_text(enabled)
    (leaf / "cgroup.subtree_control").chmod(0o444)
    (leaf / "cgroup.subtree_control").unlink()
    group = unified(tmp_path, "/user/app/leaf").make("claw-x", 1000, 7)
    assert group is not None
    assert group.folders == (leaf.parent / "claw-x",)
    read = {path.name: path.read_text() for path in group.folders[0].iterdir()}
    assert read == {"memory.max": "1000", "pids.max": "7", "memory.swap.max": "0"}
    assert group.events == leaf.parent / "claw-x/memory.events"
    assert group.folders[0] in unified(tmp_path, "/user/app/leaf").candidates("claw-x")


def test_no_group_where_none_can_be_made(tmp_path):
    assert unified(tmp_path, "/").make("claw-x", 1000, 7) is None
    assert cgroups.Parent("", "").make("claw-x", 1000, 7) is None
    assert list(tmp_path.iterdir()) == []


def test_version_1_groups_lie_below_our_own(tmp_path):
    for name in ("memory/outer/own", "pids"):
        (tmp_path / name).mkdir(parents=True)
    info = "".join(
        f"3{n} 20 0:2{n} / {tmp_path}/{name} rw - cgroup cgroup rw,{name}\n"
        for n, name in enumerate(("memory", "pids"))
    )
    parent = cgroups.Parent(info, "4:memory:/outer/own\n8:pids:/gone\n")
    group = parent.make("claw-x", 1000, 7)
    assert group is not None
    assert group.folders == (tmp_path / "memory/outer/own/claw-x", tmp_path / "pids/claw-x")
    assert set(group.folders) <= set(parent.candidates("claw-x"))
    assert (group.folders[0] / "memory.limit_in_bytes").read_text() == "1000"
    assert (group.folders[1] / "pids.max").read_text() == "7"


def test_a_container_sees_its_hierarchy_from_the_inside(tmp_path):
    (tmp_path / "memory/inner").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    info = (
        f"31 20 0:21 /docker/abc {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"32 20 0:22 /docker/abc {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
    )
    group = cgroups.Parent(info, "4:memory:/docker/abc/inner\n8:pids:/docker/abc\n").make("claw-x", 1000, 7)
    assert group is not None
    assert group.folders == (tmp_path / "memory/inner/claw-x", tmp_path / "pids/claw-x")


@pytest.mark.parametrize(
    ("text", "count"),
    [(b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3), (b"low 0\nmax 9\noom 4\noom_kill 2\n", 2), (b"", 0)],
)
def test_the_kills_are_counted_in_both_formats(text, count):
    assert cgroups.oom_kills(text) == count


# -- leases ---------------------------------------------------------------------------------------------------------


def lease(**changes: object) -> Lease:
    me = leases.identity(os.getpid())
    made = Lease("a1", me, me, time.time() + 1000, leases.boot_id(), leases.pid_namespace())
    return made._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        ({}, False),
        ({"owner": DEAD}, True),
        ({"launcher": DEAD}, True),
        ({"owner": (os.getpid(), 1)}, True),  # the number was given to another process
        ({"deadline": 1.0}, True),
        ({"boot_id": "another boot"}, True),
        ({"pid_namespace": "pid:[1]", "owner": DEAD}, False),  # cannot be seen from here
        ({"pid_namespace": "pid:[1]", "deadline": 1.0}, True),
    ],
)
def test_when_a_lease_is_over(changes, over):
    assert leases.over(lease(**changes), time.time()) is over


def test_a_lease_reads_as_it_was_written(tmp_path):
    written = lease(groups=("/sys/fs/cgroup/claw-a1",), deadline=float("inf"))
    leases.write(tmp_path, written)
    assert leases.read(tmp_path / "a1") == written


@pytest.mark.parametrize("text", ["", "[]", "null", '{"id": "a1"}', '{"id": 1, "owner": "x"}', "\x00"])
def test_a_broken_lease_is_none_and_reaped_once_old(tmp_path, text):
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1/lease.json").write_text(text)
    assert leases.read(tmp_path / "a1") is None
    assert leases.reap(tmp_path).sandboxes == ()
    assert leases.reap(tmp_path, now=time.time() + leases.YOUNG_S + 1).sandboxes == ("a1",)
    assert not (tmp_path / "a1").exists()


def test_reap_kills_what_a_lease_names_and_nobody_else(tmp_path):
    child = subprocess.Popen(["sleep", "1000"])
    other = subprocess.Popen(["sleep", "1000"])
    try:
        leases.write(tmp_path, lease(owner=DEAD))
        leases.add_process(tmp_path, "a1", child.pid)
        with (tmp_path / "a1/processes").open("a") as file:
            file.write(f"{other.pid} 1\n")  # a number that another process has taken over
        assert leases.reap(tmp_path) == leases.Reaped(("a1",), 1, ())
        assert child.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (child, other):
            process.kill()
            process.wait(10)


def test_reap_follows_no_link_and_removes_locked_folders(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "f").write_text("keep")
    state = tmp_path / "state"
    state.mkdir()
    leases.write(state, lease(owner=DEAD))
    (state / "a1/link").symlink_to(precious)
    (state / "planted").symlink_to(precious)
    (state / "a1/locked/deep").mkdir(parents=True)
    (state / "a1/locked").chmod(0)
    leases.reap(state, now=time.time() + leases.YOUNG_S + 1)
    assert list(state.iterdir()) == []
    assert (precious / "f").read_text() == "keep"


def test_reap_removes_no_group_that_is_not_ours(tmp_path):
    foreign = tmp_path / "system.slice"
    foreign.mkdir()
    state = tmp_path / "state"
    state.mkdir()
    leases.write(state, lease(owner=DEAD, groups=(str(foreign),)))
    leases.reap(state)
    assert foreign.is_dir()


# -- processes ------------------------------------------------------------------------------------------------------


def test_a_signal_never_reaches_a_process_that_took_over_the_number():
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert not procs.send(child.pid, signal.SIGKILL, start=1)
        assert child.poll() is None
        assert procs.send(child.pid, signal.SIGKILL, start=procs.start_time(child.pid))
    finally:
        child.kill()
        child.wait(10)
    assert procs.start_time(child.pid) is None
    assert not procs.send(child.pid, signal.SIGKILL)


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


def test_marked_processes_are_found_wherever_they_went():
    subprocess.run([sys.executable, "-c", DAEMON], env={"CLAW_SANDBOX_ID": "m1"}, timeout=20, check=True)
    assert len(procs.marked(leases.marker("m1"))) == 1
    assert leases.kill_marked("m1")
    assert procs.marked(leases.marker("m1")) == []
    assert procs.marked(leases.marker("m")) == []


@pytest.mark.sandbox
def test_without_private_mounts_files_lie_in_the_lease_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "enter_private", lambda: (Privacy.NONE, None))
    state = tmp_path / "state"
    host = Host(state, os.getpid())
    held = host.create(Request("a1", False, 2**26, 32, 2**20, 1000.0))
    assert held.mounted == []
    null = os.open(os.devnull, os.O_RDWR)
    reader, writer = os.pipe()
    try:
        host.start_check(
            "a1", ["sh", "-c", "id -u; touch /grade/f && echo wrote; touch f || echo kept"], [null, writer, writer]
        )
        assert host.end("a1", Part.CHECK, 10.0) == 0
        said = os.read(reader, 4096)
        assert said.startswith(b"1000\nwrote\n")
        assert said.endswith(b"kept\n")
    finally:
        for fd in (null, reader, writer):
            os.close(fd)
        host.close()
    assert list(state.iterdir()) == []


@pytest.mark.sandbox
def test_a_lease_that_is_over_is_destroyed_by_the_launcher_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "enter_private", lambda: (Privacy.NONE, None))
    host = Host(tmp_path / "state", os.getpid())
    host.create(Request("a1", True, 2**26, 32, 2**20, 0.05))
    host.create(Request("b2", True, 2**26, 32, 2**20, 1000.0))
    until(lambda: host.expire() > 1, "the short lease ends")
    assert not (tmp_path / "state/a1").exists()
    assert (tmp_path / "state/b2").exists()
    host.close()
