"""HTTP bodies of the routes, with SGLang's names; only what the engine computes is accepted.

In: JSON. Out: checked bodies and `Params`. An option that would change the reply and is not computed is refused by
name, never ignored. It knows no engine.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from claw_train.engine.request import Params

_MAX_TOP_LOGPROBS = 1024
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1, None),
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (True, False, None),
}


class SamplingParams(BaseModel):
    """`sampling_params` of a request."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_new_tokens: int = Field(default=0, ge=0)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, neutral in _NEUTRAL.items():
            if name in data and data[name] not in neutral:
                raise ValueError(f"sampling_params.{name} is not supported by the embedded engine")
        return {k: v for k, v in data.items() if k not in _NEUTRAL}

    def params(self) -> Params:
        """The same for the engine.

        Raises:
            ValueError: more tokens are required than allowed.
        """
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Params(
            max_new_tokens=self.max_new_tokens,
            # as SGLang: a vanishing temperature is greedy
            temperature=self.temperature if self.temperature >= 1e-6 else 0.0,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p,
            stop=tuple(s for s in stops if s),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_new_tokens,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim,
            seed=self.sampling_seed,
        )


class GenerateBody(BaseModel):
    """`POST /generate`; every list-valued field goes with a batch of prompts."""

    model_config = ConfigDict(extra="forbid")

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=SamplingParams)
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    lora_path: str | list[str | None] | None = None
    priority: int | None = None
    # accepted because they change no token
    session_id: str | None = None
    routing_key: str | None = None
    log_metrics: bool = True

    @model_validator(mode="after")
    def _one_prompt_kind(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("send either input_ids or text")
        prompts = self.input_ids if self.input_ids is not None else self.text
        if not prompts:
            raise ValueError("the prompt is empty")
        for name in ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path"):
            value = getattr(self, name)
            if isinstance(value, list) and (not self.batched or len(value) != len(prompts)):
                raise ValueError(f"{name} has {len(value)} entries for {len(prompts) if self.batched else 1} prompts")
        top = self.top_logprobs_num if isinstance(self.top_logprobs_num, list) else [self.top_logprobs_num]
        if not all(0 <= t <= _MAX_TOP_LOGPROBS for t in top):
            raise ValueError(f"top_logprobs_num must be 0 to {_MAX_TOP_LOGPROBS}")
        return self

    @property
    def batched(self) -> bool:
        """Whether there are several prompts, answered by a list."""
        prompts = self.input_ids if self.input_ids is not None else self.text
        return isinstance(prompts, list) and (self.input_ids is None or isinstance(prompts[0], list))

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt."""
        prompts = self.input_ids if self.input_ids is not None else self.text
        return prompts if self.batched else [prompts]  # pyright: ignore[reportReturnType]

    def entry(self, name: str, index: int) -> object:
        """A field's value for prompt `index`."""
        value = getattr(self, name)
        return value[index] if isinstance(value, list) else value


class AbortBody(BaseModel):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None


class LoadAdapterBody(BaseModel):
    """`POST /load_lora_adapter`."""

    lora_name: str = Field(min_length=1)
    lora_path: str
    pinned: bool = False


class UnloadAdapterBody(BaseModel):
    """`POST /unload_lora_adapter`."""

    lora_name: str


class UpdateWeightsBody(BaseModel):
    """`POST /update_weights_from_disk`."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class PauseBody(BaseModel):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
