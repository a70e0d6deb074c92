"""A request's state as the JSON that SGLang would send.

In: a `Request`, ended or not. Out: `text`, `output_ids` and `meta_info`. It changes nothing.
"""

import math
import time
from collections.abc import Sequence

from claw_train.engine.request import Finish, FinishKind, Request
from claw_train.engine.sampling import Drawn
from claw_train.engine.text import Texts

Json = dict[str, object]
Triple = tuple[float | None, int, str | None]


def reply(request: Request, texts: Texts, *, token_texts: bool, prompt_ids: bool) -> Json:
    """The whole reply so far.

    Raises:
        EngineError: the tokenizer failed on the ids.
    """
    output = list(request.output)
    ids = [d.token for d in output]
    finish, p = request.finish, request.params
    matched = finish.matched if finish is not None else None
    meta: Json = {
        "id": request.rid,
        "finish_reason": finish_reason(finish),
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": request.cached_tokens,
        "weight_version": request.version or (request.spans[-1].version if request.spans else ""),
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in request.spans],
        "num_retractions": request.retractions,
        "e2e_latency": time.monotonic() - request.created,
    }
    if request.return_logprob:
        label = texts if token_texts else None
        meta |= _logprobs(request, output, label)
    text = texts.reply(ids, matched, skip_special=p.skip_special_tokens, trim=not p.no_stop_trim)
    body: Json = {"text": text, "output_ids": ids, "meta_info": meta}
    if prompt_ids:
        body["prompt_token_ids"] = request.prompt
    return body


def finish_reason(finish: Finish | None) -> Json | None:
    """As SGLang spells it; None while the reply goes on."""
    match finish:
        case None:
            return None
        case Finish(kind=FinishKind.STOP):
            return {"type": "stop", "matched": finish.matched}
        case Finish(kind=FinishKind.LENGTH):
            return {"type": "length", "length": finish.length}
        case _:
            return {
                "type": "abort",
                "message": finish.message,
                "status_code": finish.status_code,
                "err_type": None if finish.status_code is None else "EngineError",
            }


def _logprobs(request: Request, output: Sequence[Drawn], texts: Texts | None) -> Json:
    """The first prompt position has no log-probability."""
    scores = list(request.input_scores)
    first: Triple = (None, request.prompt[request.score_from], _text(request.prompt[request.score_from], texts))
    fields: Json = {
        "input_token_logprobs": [first, *(_triple(d.logprob, d.token, texts) for d in scores)],
        "output_token_logprobs": [_triple(d.logprob, d.token, texts) for d in output],
        "output_token_logprobs_length": len(output),
    }
    if request.top_logprobs:
        fields["input_top_logprobs"] = [None, *(_top(d, texts) for d in scores)]
        fields["output_top_logprobs"] = [_top(d, texts) for d in output]
    return fields


def _top(drawn: Drawn, texts: Texts | None) -> list[Triple]:
    return [_triple(logprob, token, texts) for logprob, token in drawn.top]


def _triple(logprob: float, token: int, texts: Texts | None) -> Triple:
    # JSON has no infinity; SGLang sends the lowest float as well
    return (logprob if math.isfinite(logprob) else -3.4028234663852886e38, token, _text(token, texts))


def _text(token: int, texts: Texts | None) -> str | None:
    return None if texts is None else texts.decode([token], skip_special=False)
