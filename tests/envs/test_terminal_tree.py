import pytest

from claw_envs.errors import GraderError
from claw_envs.sandbox.fake import FakeSandbox
from claw_envs.terminal.tree import MAX_LISTING, Entry, Tree, snapshot
from claw_envs.types import ExecResult

FILES = {"a.txt": "one\n", "box/b.txt": "two\n", "empty/": ""}


def listing(*rows: str, exit_code: int = 0, omitted: int = 0) -> FakeSandbox:
    data = b"".join(row.encode("utf-8", "surrogateescape") + b"\0" for row in rows)
    return FakeSandbox(checks=ExecResult(stdout=data, stderr=b"", exit_code=exit_code, stdout_omitted=omitted))


def frozen(sandbox: FakeSandbox) -> FakeSandbox:
    sandbox.freeze()
    return sandbox


def test_reads_kind_mode_size_and_odd_names():
    tree = snapshot(
        frozen(listing("f 644 3 a b.txt", "d 755 40 box", "l 777 5 box/link", "f 600 0 new\nline", "p 644 0 \udcff"))
    )
    assert tree.entries["a b.txt"] == Entry(kind="f", mode=0o644, size=3)
    assert tree.is_folder("box")
    assert not tree.is_file("box/link")
    assert tree.mode("new\nline") == 0o600
    assert tree.entries["\udcff"].kind == "p"


def test_text_is_read_once_and_only_from_regular_files():
    sandbox = listing("f 644 4 a.txt", "l 777 5 link.txt", "f 644 2 bad.txt", "f 644 99999999 huge.txt")
    sandbox.files = {f"/work/{name}": b"one\n" for name in ("a.txt", "link.txt", "huge.txt")}
    sandbox.files["/work/bad.txt"] = b"\xff\xfe"
    tree = snapshot(frozen(sandbox))
    assert tree.text("a.txt") == "one\n"
    assert tree.lines("a.txt") == ["one"]
    for path in ("link.txt", "bad.txt", "huge.txt", "missing.txt"):
        assert tree.text(path) is None
        assert tree.lines(path) is None


def test_a_file_that_grew_after_the_listing_has_no_text():
    sandbox = listing("f 644 4 a.txt")
    sandbox.files["/work/a.txt"] = b"x" * 100_000
    assert snapshot(frozen(sandbox)).text("a.txt") is None


@pytest.mark.parametrize(
    "sandbox", [listing("f 644 1 " + "x" * MAX_LISTING), listing("f 644 1 a", omitted=5)], ids=["long", "cut"]
)
def test_a_listing_too_long_is_incomplete_and_passes_nothing(sandbox):
    tree = snapshot(frozen(sandbox))
    assert not tree.complete
    assert not tree.unchanged({})


@pytest.mark.parametrize("exit_code", [1, None])
def test_a_listing_that_fails_is_the_graders_fault(exit_code):
    with pytest.raises(GraderError):
        snapshot(frozen(listing("f 644 1 a", exit_code=exit_code)))


def test_start_tree_is_unchanged():
    tree = Tree.of_start(FILES, {"a.txt": 0o600})
    assert tree.unchanged(FILES, modes={"a.txt": 0o600})
    assert tree.mode("a.txt") == 0o600
    assert tree.is_folder("box")
    assert tree.is_folder("empty")


@pytest.mark.parametrize(
    "now",
    [
        {**FILES, "a.txt": "other\n"},
        {**FILES, "new.txt": ""},
        {"a.txt": "one\n", "box/b.txt": "two\n"},
        {"box/b.txt": "two\n", "empty/": ""},
        {**FILES, "empty/inner.txt": ""},
        {"a.txt": "one\n", "box/b.txt": "two\n", "empty": "a file"},
    ],
)
def test_any_other_change_shows(now):
    assert not Tree.of_start(now, {}).unchanged(FILES)


def test_a_changed_mode_shows():
    assert not Tree.of_start(FILES, {"a.txt": 0o755}).unchanged(FILES)
    assert Tree.of_start(FILES, {"a.txt": 0o755}).unchanged(FILES, modes={"a.txt": 0o755})


def test_changes_the_task_asks_for_do_not_show():
    assert Tree.of_start({"box/b.txt": "two\n", "empty/": "", "c.txt": "new"}, {}).unchanged(
        FILES, but=["a.txt", "c.txt"]
    )
