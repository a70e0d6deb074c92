"""Weights in the Hugging Face cache or on its hub.

In: a repository id. Out: a local snapshot folder that is whole. Never hangs: the hub must answer a first small request
within seconds, and a machine without a network is told so. Knows nothing of other sources.
"""

import json
import logging
import os
import threading
from pathlib import Path

from claw_train.errors import ModelError, boundary

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TOKENIZER_PATTERNS = [*TOKENIZER_FILES, "generation_config.json", "config.json", "special_tokens_map.json"]
_MODEL_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors", "*.safetensors.index.json", "preprocessor_config.json"]
_PROBE_TIMEOUT_S = 4.0


def missing_part(folder: Path, *, weights: bool) -> str | None:
    """What `folder` lacks to be a model (or, without `weights`, a tokenizer); None when it is whole."""
    if not folder.is_dir():
        return "no such folder"
    needed = ["tokenizer.json", "config.json"] if weights else ["tokenizer.json"]
    for name in needed:
        if not (folder / name).is_file():
            return f"no {name}"
    if not weights or (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "no model.safetensors"
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return f"{index.name} is unreadable"
    absent = sorted(name for name in shards if not (folder / name).is_file())
    return f"{len(absent)} of {len(shards)} weight files missing" if absent else None


def hub_cached(repo: str, *, weights: bool) -> Path:
    """The newest whole snapshot in the local Hugging Face cache; asks no network.

    Raises:
        ModelError: not there, or only in part.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    store = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    head = store / "refs" / "main"
    if not head.is_file():
        raise ModelError("not in the cache")
    snapshot = store / "snapshots" / head.read_text().strip()
    lacks = missing_part(snapshot, weights=weights)
    if lacks is not None:
        raise ModelError(f"only in part in the cache ({lacks})")
    return snapshot


def hub_download(repo: str, *, weights: bool) -> Path:
    """Fetches the repository's main branch into the Hugging Face cache; an interrupted fetch goes on later.

    Raises:
        ModelError: offline, unreachable, refused, or not whole.
    """
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE):
        raise ModelError("HF_HUB_OFFLINE is set")
    _probe()
    from huggingface_hub import snapshot_download

    logger.info("fetching %s from the hub", repo)
    patterns = _MODEL_PATTERNS if weights else _TOKENIZER_PATTERNS
    with boundary(ModelError, f"hub download of {repo}"):
        folder = Path(snapshot_download(repo, allow_patterns=patterns, etag_timeout=10))
    lacks = missing_part(folder, weights=weights)
    if lacks is not None:
        raise ModelError(f"the hub's repository is not usable: {lacks}")
    return folder


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def _probe() -> None:
    """One small request in a thread of its own: looking up a host name knows no timeout.

    Raises:
        ModelError: no answer in time.
    """
    import httpx
    from huggingface_hub.constants import ENDPOINT

    answer: list[str] = []

    def ask() -> None:
        try:
            httpx.head(ENDPOINT, timeout=_PROBE_TIMEOUT_S, follow_redirects=False)
            answer.append("")
        except httpx.HTTPError as error:
            answer.append(f"hub not reachable ({error or type(error).__name__})")

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_TIMEOUT_S + 1.0)
    if not answer:
        raise ModelError(f"hub not reachable (no answer within {_PROBE_TIMEOUT_S + 1.0:.0f} s)")
    if answer[0]:
        raise ModelError(answer[0])
