"""Reading and writing below a folder whose content is hostile; no sandbox is needed for that."""

import os
import socket
import stat

import pytest

from claw_envs.sandbox.host import files


@pytest.fixture
def root(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/work").mkdir()
    (tmp_path / "outside").write_text("secret")
    fd = os.open(tmp_path / "inside", os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def work(root, tmp_path):
    return tmp_path / "inside/work"


def read(root, name):
    found = files.open_regular(root, f"/work/{name}")
    return None if found is None else files.read_open(found, name, 1000)


def write(root, name, data=b"data", mode=0o644):
    files.write(root, f"/work/{name}", data, mode, None)


def test_links_resolve_as_inside(root, work):
    (work / "f").write_text("text")
    (work / "relative").symlink_to("f")
    (work / "absolute").symlink_to("/work/f")
    assert (read(root, "relative"), read(root, "absolute")) == (b"text", b"text")


@pytest.mark.parametrize(
    "target", ["../../outside", "../../../../../../../../etc/hostname", "/etc/hostname", "/proc/self/environ", "/"]
)
def test_no_link_leads_out(root, work, target):
    (work / "link").symlink_to(target)
    assert read(root, "link") is None
    assert read(root, "link/hostname") is None


def test_a_loop_of_links_is_no_file(root, work):
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    assert read(root, "a") is None


def test_what_is_no_regular_file_is_not_opened(root, work):
    os.mkfifo(work / "fifo")
    (work / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(work / "socket"))
        assert [read(root, name) for name in ("fifo", "folder", "socket", "absent")] == [None] * 4


def test_a_sparse_file_is_refused_by_its_size(root, work):
    with (work / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="1099511627776 bytes, more than the 1000"):
        read(root, "huge")


def test_write_makes_parents_and_sets_bits(root, work):
    write(root, "a/b/c", b"x" * 100_000, 0o751)
    assert (work / "a/b/c").read_bytes() == b"x" * 100_000
    assert stat.S_IMODE((work / "a/b/c").stat().st_mode) == 0o751


def test_write_replaces_a_link_and_a_fifo_in_its_way(root, work, tmp_path):
    (work / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(work / "fifo")
    write(root, "link")
    write(root, "fifo")
    assert (tmp_path / "outside").read_text() == "secret"
    assert (read(root, "link"), read(root, "fifo")) == (b"data", b"data")


def test_write_never_leaves_through_a_parent(root, work, tmp_path):
    (work / "up").symlink_to("../..")
    write(root, "up/planted")
    assert not (tmp_path / "planted").exists()
    (work / "away").symlink_to("/nowhere")
    with pytest.raises(OSError, match=r"No such file|File exists"):
        write(root, "away/planted")


def test_write_over_a_folder_leaves_no_litter(root, work):
    (work / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(root, "folder")
    assert [path.name for path in work.iterdir()] == ["folder"]


def test_without_openat2_no_link_is_followed(root, work, monkeypatch):
    monkeypatch.setattr(files, "_OPENAT2", -1)
    (work / "f").write_text("text")
    (work / "link").symlink_to("f")
    (work / "folder").symlink_to(".")
    assert [read(root, name) for name in ("f", "link", "folder/f", "../../outside")] == [b"text", None, None, None]
    write(root, "a/b")
    assert read(root, "a/b") == b"data"
