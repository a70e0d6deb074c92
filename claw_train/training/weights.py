"""Weights for the engine: a folder that transformers, PEFT and the engine servers can load, named by version.

In: a policy and a version. Out: `weights/<version>/` and its `WeightRef`. LoRA writes PEFT's format (float32), full
training a Hugging Face folder in the engine's type. Knows neither optimizer nor checkpoint.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from claw_train.errors import TrainerError, boundary
from claw_train.training.folders import durable_folder, weights_dir
from claw_train.training.model import DTYPES, Policy
from claw_train.training.spec import TrainerSpec
from claw_train.training.state import sha256
from claw_train.types import Version, WeightKind, WeightRef


def publish(
    policy: Policy, spec: TrainerSpec, version: Version, before: Callable[[], None], after: Callable[[], None]
) -> WeightRef:
    """Writes the current weights durably.

    Args:
        policy: whose weights.
        spec: gives folder and type.
        version: the folder's name; must be new.
        before: called before the folder gets its name.
        after: called when it has it.

    Raises:
        TrainerError: the disk is full or failed, or the version exists.
    """
    target = weights_dir(Path(spec.run_dir)) / str(version)
    kind = WeightKind.LORA if policy.peft is not None else WeightKind.FULL
    name = "adapter_model.safetensors" if kind is WeightKind.LORA else "model.safetensors"
    with boundary(TrainerError, f"weights {target} cannot be written"), durable_folder(target, before, after) as folder:
        if policy.peft is not None:
            _write_adapter(policy, spec, folder, name)
        else:
            _write_full(policy, DTYPES[spec.weights_dtype], folder, name)
        checksum = sha256(folder / name)
    return WeightRef(version=version, kind=kind, path=str(target), checksum=checksum)


def _write_adapter(policy: Policy, spec: TrainerSpec, folder: Path, name: str) -> None:
    assert policy.peft is not None
    tensors = get_peft_model_state_dict(policy.peft)
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, folder / name)
    config = {
        **policy.peft.peft_config["default"].to_dict(),
        "base_model_name_or_path": spec.model_path,
        "inference_mode": True,
    }
    targets = config["target_modules"]
    config["target_modules"] = sorted(targets) if isinstance(targets, set) else targets
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str))


def _write_full(policy: Policy, dtype: torch.dtype, folder: Path, name: str) -> None:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in _named_tensors(policy.causal):
        # a tied output matrix is the embedding's tensor and is stored once, under the first name
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            tensors[key] = (value.to(dtype) if value.is_floating_point() else value).contiguous().cpu()
    save_file(tensors, folder / name, metadata={"format": "pt"})
    config = policy.causal.config.to_diff_dict()
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str))


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(k, v.detach()) for k, v in model.state_dict().items()]
