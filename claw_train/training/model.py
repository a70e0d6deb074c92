"""The model of a rank: loaded, made trainable, scored over packed rows; and the reference it is held to.

In: a model folder and the trainer's configuration. Out: a `Policy`: a scorer that turns a `Row` into
log-probabilities, the parameters that train, and a scorer of the base weights. Knows neither loss nor optimizer.

With LoRA the base is kept in the type of the forward pass (it never changes, so nothing is cast again and again) and
the adapters in float32; with full training the masters are float32 and autocast casts them. The output matrix is
float32 in both cases: bfloat16 logits are off by up to 0.06 at a magnitude of 10.
"""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from claw_train.errors import ConfigError, ModelError, boundary
from claw_train.training import attention
from claw_train.training.head import token_logprobs
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
        wide = weight.dtype.itemsize >= 4
        self._wide_head = (weight,) if wide else (weight.detach().float(),)

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
            fast_gradient=reduced,
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
        return Policy(causal, *_with_adapters(causal, spec, compute), reference)
    reference = Scorer(_frozen_copy(causal, compute), compute) if held else None
    if config.freeze_embeddings:
        causal.get_input_embeddings().requires_grad_(False)
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


def _frozen_copy(causal: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    twin = copy.deepcopy(causal).requires_grad_(False)
    # the declared type of `to` is wrong for this class
    return cast(PreTrainedModel, nn.Module.to(twin, dtype=dtype))


def _with_adapters(causal: PreTrainedModel, spec: TrainerSpec, compute: torch.dtype) -> tuple[PeftModel, Scorer]:
    torch.manual_seed(spec.seed)
    config = LoraConfig(
        r=spec.trainer.lora_rank,
        lora_alpha=spec.trainer.lora_alpha,
        target_modules=list(spec.lora_targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    scorer = Scorer(causal, compute)
    try:
        with warnings.catch_warnings():
            # peft asks transformers about gradient checkpointing under an old name
            warnings.simplefilter("ignore", FutureWarning)
            peft = cast(PeftModel, get_peft_model(causal, config))
    except ValueError as error:
        raise ConfigError(f"model.lora_targets={list(spec.lora_targets)}: {str(error).splitlines()[0]}") from None
    for layer in peft.modules():
        if isinstance(layer, BaseTunerLayer):
            # autocast brings adapters to the input's type; the other way round doubles the memory traffic
            layer.cast_input_dtype_enabled = compute != torch.bfloat16  # pyright: ignore[reportArgumentType]
    peft.eval()
    return peft, scorer
