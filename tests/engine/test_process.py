"""The child process: its command line, its start and its end."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from claw_train.children import thread_env
from tests.engine.support import Server, make_adapter


def run(*args: str) -> tuple[int, str]:
    """(exit code, standard error) of a server that is expected to end by itself."""
    command = [sys.executable, "-m", "claw_train.engine", *args]
    environment = {**os.environ, **thread_env(1)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        words = process.stderr.read()  # its standard input stays open meanwhile
        return process.wait(timeout=60), words


def _taken_port(_, model):
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, ["--model", str(model), "--port", str(sock.getsockname()[1])]


def _no_folder(tmp_path, _):
    return None, ["--model", str(tmp_path / "nothing")]


def _other_architecture(tmp_path, _):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return None, ["--model", str(tmp_path)]


def _long_context(_, model):
    return None, ["--model", str(model), "--context", "5000"]


def _open_host(_, model):
    return None, ["--model", str(model), "--host", "0.0.0.0"]


@pytest.mark.parametrize(
    ("arrange", "named"),
    [
        (_taken_port, "--port"),
        (_no_folder, "nothing/config.json"),
        (_other_architecture, "gpt2"),
        (_long_context, "--context"),
        (_open_host, "--key-env"),
    ],
)
def test_a_bad_start_is_one_line_and_exit_code_two(tmp_path, qwen3, arrange, named):
    held, args = arrange(tmp_path, qwen3)
    port_file = tmp_path / "port"
    code, words = run(*args, "--port-file", str(port_file))
    if held is not None:
        held.close()
    assert code == 2
    assert words.count("\n") == 1
    assert named in words
    assert not port_file.exists()


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "claw_train.engine", *sys.argv[1:]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def test_the_server_ends_when_its_parent_is_killed(tmp_path, qwen3):
    args = ["--model", str(qwen3), "--port-file", str(tmp_path / "port")]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *args], stdout=subprocess.PIPE, env={**os.environ, **thread_env(1)}, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_it_ends_when_told(tmp_path, qwen3):
    server = Server(tmp_path, qwen3)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=20)
    server.close()


@pytest.mark.parametrize("point", ["before", "after"])
def test_it_can_be_killed_while_it_takes_weights_over(tmp_path, qwen3, point):
    server = Server(tmp_path, qwen3, env={"CLAW_CRASH_AT": f"engine.load.{point}"})
    folder = make_adapter(tmp_path / "adapter", 1)
    with pytest.raises(Exception, match=r"disconnected|reset|refused"):
        server.post("/load_lora_adapter", lora_name="a-1", lora_path=str(folder))
    assert server.process.wait(timeout=20) == -signal.SIGKILL
    server.close()
