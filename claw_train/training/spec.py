"""What a rank must know, and what it and the main process say to one another. Imports no torch.

`TrainerSpec` is written once as a JSON file that every rank reads. `Request` and `Reply` travel as JSON over a local
authenticated socket; nothing is ever pickled.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from claw_train.config import GuardConfig, MethodConfig, TrainerConfig
from claw_train.errors import ClawTrainError, ConfigError, GuardError, ModelError, TrainerError
from claw_train.types import Batch, StepReport, Version, WeightRef

KEY_ENV = "CLAW_TRAINER_KEY"
"""Environment variable that holds the key of the sockets, in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """One policy's trainer, the same for all its ranks."""

    model_path: str
    """Folder of config, safetensors and, where there is one, tokenizer."""
    run_dir: str
    """Checkpoints go to `checkpoints/`, weights for the engine to `weights/`."""
    trainer: TrainerConfig
    method: MethodConfig
    guards: GuardConfig = field(default_factory=GuardConfig)
    policy: str = "main"
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers; empty is all but the output layer."""
    weights_dtype: str = "bfloat16"
    """Of full weights written for the engine: float32 or bfloat16. Adapters are float32."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Where the ranks stand after a start or a load."""

    version: Version
    weights: WeightRef | None
    """What the engine must serve; None when it is the untouched base."""


class Op(StrEnum):
    """What a rank can be asked to do."""

    INIT = "init"
    """Build the model; then as LOAD."""
    LOAD = "load"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """To a rank."""

    op: Op
    checkpoint: str | None = None
    """With INIT and LOAD; None is the base."""
    lineage: int = 0
    """With INIT and LOAD."""
    batch: Batch | None = None
    """With STEP."""


class Failure(StrEnum):
    """Kinds of errors that cross the socket."""

    GUARD = "guard"
    CONFIG = "config"
    MODEL = "model"
    TRAINER = "trainer"


_ERRORS: dict[Failure, type[ClawTrainError]] = {
    Failure.GUARD: GuardError,
    Failure.CONFIG: ConfigError,
    Failure.MODEL: ModelError,
    Failure.TRAINER: TrainerError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """From a rank, one for each request. A rank other than 0 answers a step with an empty one."""

    started: Started | None = None
    report: StepReport | None = None
    failure: Failure | None = None
    text: str = ""
    """With `failure`."""

    @classmethod
    def of(cls, error: ClawTrainError) -> "Reply":
        """The reply that carries `error`."""
        kind = next((k for k, e in _ERRORS.items() if isinstance(error, e)), Failure.TRAINER)
        return cls(failure=kind, text=str(error))

    def error(self) -> ClawTrainError | None:
        """The error that was sent; None when all went well."""
        return None if self.failure is None else _ERRORS[self.failure](self.text)
