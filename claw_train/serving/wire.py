"""The JSON of SGLang's /generate, and our types. Pure functions.

In: a request, or a decoded reply. Out: a body to send, or a checked `Completion` or `TokenScores`. A reply that is not
whole (lengths, ids, non-finite log-probabilities, unknown weights) is an error and never becomes a value.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from claw_train.errors import EngineError
from claw_train.types import Completion, GenerateRequest, Sampling, TokenScores, Version

_FINISH = {"stop": "stop", "length": "length", "abort": "abort"}
_ROUNDING = 1e-3
"""How far above 0 a log-probability may lie by rounding."""
_LOWEST = -1e6
"""Servers write minus infinity as the lowest float: no token of that probability was sampled."""


def generate_body(
    request: GenerateRequest, rid: str, adapter: str | None, *, priorities: bool = False
) -> dict[str, Any]:
    """Body of /generate for a reply with log-probabilities.

    Args:
        request: what is asked.
        rid: request id on the server.
        adapter: LoRA adapter; None is the server's own weights.
        priorities: the server lets live requests overtake in its own queue.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if priorities and request.live:
        body["priority"] = 1
    return body if adapter is None else {**body, "lora_path": adapter}


def score_body(
    rid: str, prompt_ids: Sequence[int], token_ids: Sequence[int], top_k: int, adapter: str | None
) -> dict[str, Any]:
    """Body of /generate that samples nothing and scores `token_ids` after `prompt_ids`."""
    body = {
        "rid": rid,
        "input_ids": [*prompt_ids, *token_ids],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # the entry at this position is the last of the prompt: its own log-probability may be null
        "logprob_start_len": len(prompt_ids) - 1,
        "top_logprobs_num": top_k,
        "stream": False,
    }
    return body if adapter is None else {**body, "lora_path": adapter}


def read_completion(
    reply: Mapping[str, Any],
    sampling: Sampling,
    label: Callable[[str], Version],
    label_whole: Callable[[str], Version] | None = None,
) -> Completion:
    """Checks a reply of /generate and makes a completion of it.

    Args:
        reply: the decoded JSON object.
        sampling: of the request.
        label: name of weights -> version; raises EngineError for a name it does not know.
        label_whole: the same for the one name of a reply without spans; None is `label`.

    Raises:
        EngineError: anything missing, unequal in length, out of range or not finite.
    """
    meta = _meta(reply)
    finish = meta.get("finish_reason")
    kind = _FINISH.get(str(cast(Mapping[str, Any], finish).get("type"))) if isinstance(finish, Mapping) else None
    if kind is None:
        raise EngineError(f"the engine's reply has finish_reason {finish!r}")
    ids = _ids(reply.get("output_ids"))
    rows = cast(object, meta.get("output_token_logprobs")) or []
    logprobs = _logprobs(rows, ids)
    text = reply.get("text")
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        versions=_versions(meta, len(ids), label, label_whole or label),
        finish_reason=kind,
        sampling=sampling,
        text=text if isinstance(text, str) else "",
    )


def read_scores(
    reply: Mapping[str, Any], token_ids: Sequence[int], top_k: int, check: Callable[[str], Version]
) -> TokenScores:
    """Checks the prompt scores in a reply of /generate.

    Raises:
        EngineError: as `read_completion`, and too few of the `top_k` likeliest tokens.
    """
    meta = _meta(reply)
    _versions(meta, 0, check, check)
    n = len(token_ids)
    rows = _list(meta.get("input_token_logprobs"), "input_token_logprobs")[-n:]
    logprobs = _logprobs(rows, tuple(token_ids))
    if top_k == 0:
        return TokenScores(logprobs=logprobs)
    tops = _list(meta.get("input_top_logprobs"), "input_top_logprobs")[-n:]
    if len(tops) != n:
        raise EngineError(f"the engine scored the likeliest tokens at {len(tops)} of {n} positions")
    top_ids: list[tuple[int, ...]] = []
    top_logprobs: list[tuple[float, ...]] = []
    for row in tops:
        triples = _list(row, "input_top_logprobs")
        if len(triples) < top_k:
            raise EngineError(f"the engine gave {len(triples)} of the {top_k} likeliest tokens")
        ids = _ids([_entry(t)[1] for t in triples[:top_k]])
        top_ids.append(ids)
        top_logprobs.append(_logprobs(triples[:top_k], ids))
    return TokenScores(logprobs=logprobs, top_ids=tuple(top_ids), top_logprobs=tuple(top_logprobs))


def weight_name(reply: Mapping[str, Any]) -> str:
    """The name of the weights that a reply's last token came from.

    Raises:
        EngineError: it names none.
    """
    meta = _meta(reply)
    spans = meta.get("weight_versions")
    name = meta.get("weight_version")
    if isinstance(spans, list) and spans:
        last = cast(list[object], spans)[-1]
        name = cast(Mapping[str, Any], last).get("version") if isinstance(last, Mapping) else None
    if not isinstance(name, str):
        raise EngineError("the engine's reply names no weights")
    return name


def _versions(
    meta: Mapping[str, Any], n: int, label: Callable[[str], Version], label_whole: Callable[[str], Version]
) -> tuple[Version, ...]:
    """The version of each of `n` tokens, from spans, or from the one name of the whole reply."""
    spans = meta.get("weight_versions")
    if not isinstance(spans, list) or not spans:
        name = meta.get("weight_version")
        if not isinstance(name, str):
            raise EngineError("the engine's reply names no weights")
        return (label_whole(name),) * n
    found: list[Version] = []
    for span in cast(list[object], spans):
        row = cast(Mapping[str, object], span) if isinstance(span, Mapping) else {}
        start, end, name = row.get("start"), row.get("end"), row.get("version")
        if not isinstance(end, int) or start != len(found) or not len(found) <= end <= n or not isinstance(name, str):
            raise EngineError(f"the engine's weight spans do not cover {n} tokens: {spans}")
        found += [label(name)] * (end - len(found))
    if len(found) != n:
        raise EngineError(f"the engine's weight spans cover {len(found)} of {n} tokens")
    return tuple(found)


def _meta(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = reply.get("meta_info")
    if not isinstance(meta, Mapping):
        raise EngineError("the engine's reply has no meta_info")
    return cast(Mapping[str, Any], meta)


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise EngineError(f"the engine's reply has no {name}")
    return cast(list[object], value)


def _ids(value: object) -> tuple[int, ...]:
    ids = _list(value, "output_ids")
    if not all(type(i) is int and i >= 0 for i in ids):
        raise EngineError("the engine's reply holds something else than token ids")
    return tuple(cast(list[int], ids))


def _entry(value: object) -> tuple[object, object]:
    row = _list(value, "log-probability entries")
    if len(row) < 2:
        raise EngineError(f"not a log-probability entry: {row}")
    return row[0], row[1]


def _logprobs(rows: object, ids: Sequence[int]) -> tuple[float, ...]:
    """Natural logs out of [logprob, id, text] rows that belong to `ids`."""
    entries = [_entry(row) for row in _list(rows, "log-probabilities")]
    if len(entries) != len(ids):
        raise EngineError(f"the engine gave {len(entries)} log-probabilities for {len(ids)} tokens")
    values: list[float] = []
    for (value, got), want in zip(entries, ids, strict=True):
        if got != want:
            raise EngineError(f"the engine's log-probabilities belong to other tokens: {got} instead of {want}")
        if not isinstance(value, int | float) or not _LOWEST < value <= _ROUNDING:
            raise EngineError(f"the engine gave log-probability {value} for token {want}")
        values.append(min(float(value), 0.0))
    return tuple(values)
