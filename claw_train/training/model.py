"""The model of a rank: loaded, made trainable, scored over packed rows; and the reference it is held to.

In: a model folder and the trainer's configuration. Out: a `Policy`: a scorer that turns a `Row` into
log-probabilities, the parameters that train, and a scorer of the base weights. Knows neither loss nor optimizer.

With LoRA the base is kept in the type of the forward pass (it never changes, so nothing is cast again and again) and
the adapters in float32; with full training the masters are float32 and autocast casts them. The output matrix is
float32 in both cases: bfloat16 logits are off by up to 0.06 at a magnitude of 10.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from claw_train.errors import ModelError, boundary
from claw_train.training import attention
from claw_train.training.head import token_logprobs
from claw_train.training.lora import add_adapters
from claw_train.training.packing import Row
from claw_train.training.spec import TrainerSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Scorer(nn.Module):
    """Log-probabilities of a row's trained tokens. Its forward is the whole computation, so DDP can wrap it."""

    def __init__(self, causal: PreTrainedModel, compute: torch.dtype) -> None:
        super().__init__()
        self.backbone = cast(nn.Module, causal.get_decoder())
        self.head = cast(nn.Module, causal.get_output_embeddings())
        self.compute = compute
        weight = cast(Tensor, self.head.weight)
        # a plain attribute: no part of any state dict, and not broadcast between ranks
        self._narrow = weight.dtype == torch.bfloat16
        self._wide_head = (weight.detach().float() if self._narrow else weight,)

    def forward(self, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n] with gradient and entropies in nats [n], float32."""
        device = self._wide_head[0].device
        reduced = self.compute == torch.bfloat16
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=reduced):
            output = self.backbone(
                input_ids=row.ids[None],
                position_ids=row.positions[None],
                use_cache=False,
                claw_blocks=row.blocks,
            )
        logprobs, entropies = token_logprobs(
            output.last_hidden_state[0, row.sources],
            self._wide_head[0],
            row.temperatures,
            row.item_source,
            row.item_target,
            narrow=self._narrow,
        )
        return logprobs, entropies[row.item_source]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank trains."""

    causal: PreTrainedModel
    """The model with its weights; with LoRA its linear layers are wrapped."""
    peft: PeftModel | None
    """None with full training."""
    scorer: Scorer
    reference: Scorer | None
    """Of the base weights; None when nothing is held to them."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that train, by name."""
        owner: nn.Module = self.peft if self.peft is not None else self.causal
        return {name: p for name, p in owner.named_parameters() if p.requires_grad}


def load_policy(spec: TrainerSpec, device: torch.device) -> Policy:
    """Loads the base and makes it trainable; the same seed gives the same adapters.

    Raises:
        ModelError: the folder cannot be loaded.
        ConfigError: LoRA targets that the model does not have.
    """
    config = spec.trainer
    compute = DTYPES[config.dtype]
    base_dtype = compute if config.kind == "lora" else torch.float32
    causal = load_causal(Path(spec.model_path), base_dtype).to(device)  # pyright: ignore[reportArgumentType]
    held = spec.method.kl_coef > 0
    if config.kind == "lora":
        for parameter in causal.parameters():
            parameter.requires_grad_(False)
        reference = Scorer(share_weights(causal), compute) if held else None
        scorer = Scorer(causal, compute)
        peft = add_adapters(
            causal, rank=config.lora_rank, alpha=config.lora_alpha, targets=spec.lora_targets, seed=spec.seed
        )
        return Policy(causal, peft, scorer, reference)
    if config.freeze_embeddings:
        causal.get_input_embeddings().requires_grad_(False)
    reference = Scorer(frozen_copy(causal, compute), compute) if held else None
    return Policy(causal, None, Scorer(causal, compute), reference)


def load_causal(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder, on the CPU, with packed attention and no dropout.

    Raises:
        ModelError: the folder cannot be loaded.
    """
    attention.register()
    with boundary(ModelError, f"model folder {path} cannot be loaded"):
        causal = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
        )
    return causal.eval()


def share_weights(causal: PreTrainedModel) -> PreTrainedModel:
    """A module tree of its own whose parameters and buffers are the very tensors of `causal`.

    PEFT wraps layers and switches adapters module-wide; a tree apart stays the base whatever it does.
    """
    shared: list[Tensor] = [*causal.parameters(), *causal.buffers()]
    return copy.deepcopy(causal, {id(t): t for t in shared})


def frozen_copy(causal: PreTrainedModel, compute: torch.dtype) -> PreTrainedModel:
    """A copy that stays as it is; what does not train in `causal` is shared.

    Its linear layers are kept in the type to which autocast would bring them for each pass, which changes no result.
    """
    fixed: list[Tensor] = [*causal.buffers(), *(p for p in causal.parameters() if not p.requires_grad)]
    twin = copy.deepcopy(causal, {id(t): t for t in fixed}).requires_grad_(False)
    for layer in twin.modules():
        if isinstance(layer, nn.Linear) and layer is not twin.get_output_embeddings():
            layer.to(compute)
    return cast(PreTrainedModel, twin)
