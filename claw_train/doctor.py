"""The trainer's part of `claw doctor`: which models this machine can train, and room for their weights.

In: `conf/model` and the machine. Out: rows. Loads no model.
"""

from claw_envs.doctor import Check, Status, disk, gib
from claw_train.models.cache import cache_dir
from claw_train.models.memory import Fit, what_fits


def models() -> list[Check]:
    """One row for each model in `conf/model`, then the cache of weights."""
    return [*(_row(fit) for fit in what_fits()), disk("model cache", cache_dir())]


def _row(fit: Fit) -> Check:
    if not fit.embedded:
        detail, fix = "needs an SGLang server", "start one and give engine=url engine.url=URL"
        return Check(name=fit.model, status=Status.LIMITED, detail=detail, fix=fix)
    detail = f"LoRA {gib(fit.lora_bytes)}, all weights {gib(fit.full_bytes)}"
    if fit.full:
        return Check(name=fit.model, status=Status.OK, detail=detail)
    status = Status.LIMITED if fit.lora else Status.MISSING
    return Check(name=fit.model, status=status, detail=f"{detail}: {'LoRA alone fits' if fit.lora else 'too big here'}")
