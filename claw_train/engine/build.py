"""Builds the engine's parts from a model folder and limits.

In: plain values from the command line. Out: `Parts` ready to be served.
"""

from pathlib import Path

import torch

from claw_train.engine.checkpoint import load_weights
from claw_train.engine.intake import Intake
from claw_train.engine.routes import Parts
from claw_train.engine.scheduler import Limits, Scheduler
from claw_train.engine.spec import read_spec
from claw_train.engine.text import Texts
from claw_train.engine.updates import Updates
from claw_train.errors import ConfigError


def build_parts(
    *,
    model: Path,
    dtype_name: str,
    device_name: str,
    max_running: int,
    max_total_tokens: int,
    context: int | None,
    version: str,
    seed: int,
    max_rank: int,
) -> Parts:
    """Loads the model and makes the parts around it.

    Raises:
        ModelError: the folder cannot be served.
        ConfigError: the device does not exist.
    """
    spec = read_spec(model)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
    device = _device(device_name)
    with torch.inference_mode():
        weights = load_weights(model, spec, dtype, device)
    scheduler = Scheduler(
        spec=spec,
        weights=weights,
        version=version,
        limits=Limits(max_running=max_running, max_total_tokens=max_total_tokens, context=context or spec.context),
        texts=Texts(model),
        dtype=dtype,
    )
    return Parts(
        scheduler=scheduler,
        intake=Intake(scheduler, seed),
        updates=Updates(scheduler, dtype=dtype, device=device, max_rank=max_rank),
        model_path=str(model),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is available; use cpu")
    return device
