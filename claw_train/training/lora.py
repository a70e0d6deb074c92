"""PEFT's LoRA layer with its arithmetic in one step.

In: a model. Out: the same model wrapped by PEFT, with adapters that PEFT saves, loads and names as ever, but whose
forward adds the low-rank product in place and whose backward is written out. PEFT's own forward makes two more passes
over every output and keeps them for the way back. Knows neither rows nor losses.

    y = x W^T + s (x A^T) B^T        dx = g W + t A      dA = t^T x      dB = s g^T (x A^T)      with t = s g B
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from claw_train.errors import ConfigError


def add_adapters(causal: PreTrainedModel, *, rank: int, alpha: int, targets: Sequence[str], seed: int) -> PeftModel:
    """Wraps linear layers; the base must be frozen. Adapters are float32 and add nothing until they are trained.

    Args:
        causal: changed in place.
        rank: of the adapters.
        alpha: adapters are scaled by alpha / rank.
        targets: names of layers; empty is every linear layer but the output.
        seed: the same one gives the same adapters.

    Raises:
        ConfigError: the model has no such layers.
    """
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: FusedLinear})
    try:
        with warnings.catch_warnings():
            # peft asks transformers about gradient checkpointing under an old name
            warnings.simplefilter("ignore", FutureWarning)
            return cast(PeftModel, get_peft_model(causal, config)).eval()
    except ValueError as error:
        raise ConfigError(f"model.lora_targets={list(targets)}: {str(error).splitlines()[0]}") from None


class FusedLinear(PeftLinear):
    """A frozen linear layer and one adapter without dropout, computed in the layer's type."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., I] -> [..., O]"""
        base = cast(nn.Linear, self.get_base_layer())
        (name,) = self.active_adapters
        flat = x.reshape(-1, x.shape[-1]).to(base.weight.dtype)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        result: Tensor = _LoraLinear.apply(flat, base.weight, base.bias, a, b, self.scaling[name])  # pyright: ignore
        return result.reshape(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        a, b = a.to(x.dtype), b.to(x.dtype)
        low = x @ a.T
        y = nn.functional.linear(x, weight, bias).addmm_(low, b.T, alpha=scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        grad = grad_outputs[0]
        t = (grad @ b).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(t, a) if ctx.needs_input_grad[0] else None
        # skinny products are faster with the long side on the right
        grad_b = (low.T @ grad).T.float().mul_(ctx.scale)
        return grad_x, None, None, (t.T @ x).float(), grad_b, None
