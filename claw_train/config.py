"""Names, types, units and checks of every configuration key. Values live in `conf/`.

In: Hydra's composed YAML. Out: one frozen `TrainConfig`; after `to_config` no OmegaConf object exists. Plug-ins (judge)
are a `_target_` with keyword arguments, built by `build`. Knows no loop; importing it imports no torch.
"""

import dataclasses
import difflib
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from claw_train.errors import ConfigError


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, else beside it in a checkout.

    Raises:
        ConfigError: neither exists.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/ folder beside {here}: reinstall claw-rl")


def _check(ok: bool, key: str, value: object, want: str) -> None:
    if not ok:
        raise ConfigError(f"{key}={value!r} is out of range: {want}")


def _check_numbers(
    section: str, config: object, names: str, low: float, high: float = math.inf, *, above: bool = False
) -> None:
    """Each named number is finite and in [low, high], or in (low, high] with `above`; None passes."""
    want = f"{'more than' if above else 'at least'} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
    for name in names.split():
        value = getattr(config, name)
        ok = value is None or (math.isfinite(value) and low <= value <= high and not (above and value == low))
        _check(ok, f"{section}.{name}", value, want)


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One source of episodes."""

    name: str
    id: str
    """Gymnasium id, `ClawTerminal-v0` or `module:Id-v0`."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Given to `gym.make` as they are; the environment checks them."""
    share: float = 1.0
    """Chance that a group is of this stream; normalised over the streams. One step may hold more or fewer of it."""
    max_concurrent: int = 64
    """Episodes at once."""
    deadline_s: float = 120.0
    """Of one reset or step; an environment that answers later is given up. Above its own limit for a command."""

    def __post_init__(self) -> None:
        _check_numbers(f"streams.{self.name}", self, "share deadline_s", 0, above=True)
        _check_numbers(f"streams.{self.name}", self, "max_concurrent", 1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A policy model: where its weights are, what it needs."""

    name: str
    hub_id: str | None = None
    """Hugging Face repository; None when there is none."""
    path: str | None = None
    """A local folder of safetensors, config and tokenizer; wins over every other source."""
    wheel: str | None = None
    """`package==version` on PyPI that carries a GGUF of the weights."""
    wheel_file: str | None = None
    """The GGUF's path inside that wheel."""
    wheel_sha256: str | None = None
    """Of the GGUF file."""
    random_init: dict[str, Any] | None = None
    """Model configuration of seeded random weights (`model=tiny`); None for real weights."""
    tokenizer: str | None = None
    """Name of another model configuration whose tokenizer is used; None is the model's own."""
    architecture: str = "llama"
    """`llama` or `qwen3` for the embedded engine; others need SGLang."""
    num_params: int = 0
    """This and the next three serve estimates of memory; 0 is unknown and makes no estimate."""
    layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    context: int = 8192
    """Tokens."""
    kv_bytes_per_token: int = 0
    """At 2 bytes a value."""
    lora_targets: list[str] = field(default_factory=list[str])
    vision: bool = False
    thinking: bool = False

    def __post_init__(self) -> None:
        _check_numbers("model", self, "context", 256)
        _check_numbers("model", self, "num_params layers hidden_size vocab_size kv_bytes_per_token", 0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine server."""

    kind: str = "embedded"
    """`embedded`, `scripted` (tests: no model) or `url`."""
    url: str | None = None
    """Of a running server; only with kind=url."""
    api_key_env: str = "CLAW_ENGINE_KEY"
    """Environment variable that holds the key of a server given by url; one on this machine may need none."""
    port: int = 0
    """0 picks a free one. This and `_OWN_SERVER` are settings of a server that we start: refused with kind=url."""
    dtype: str = "bfloat16"
    max_running: int = 64
    """Requests decoded at once."""
    max_total_tokens: int = 65536
    """Tokens of key-value cache, running requests and kept prefixes together."""
    concurrency: int = 64
    """Requests the client has open at once."""
    threads: int = 0
    """0 is this process's share of the cores."""
    timeout_s: float = 120.0
    """Of one request."""
    retries: int = 3
    start_timeout_s: float = 180.0
    restarts: int = 2
    """Restarts of a dead server before the run stops."""
    script: str | None = None
    """With kind=scripted: file of replies; None is a few shell commands."""
    faults: list[str] = field(default_factory=list[str])
    """With kind=scripted: what goes wrong, `KIND:RATE[:LIMIT]`."""

    def __post_init__(self) -> None:
        _check(
            self.kind in ("embedded", "scripted", "url"),
            "engine.kind",
            self.kind,
            "embedded, scripted or url",
        )
        if self.kind == "url":
            ok = self.url is not None and _is_http(self.url)
            _check(ok, "engine.url", self.url, "engine.kind=url needs a server's http://HOST:PORT")
        else:
            _check(self.url is None, "engine.url", self.url, "set with engine.kind=url only; engine=url chooses it")
        scripted = self.kind == "scripted"
        _check(scripted or not self.script, "engine.script", self.script, "set with engine.kind=scripted only")
        _check(scripted or not self.faults, "engine.faults", self.faults, "set with engine.kind=scripted only")
        _check(self.dtype in ("float32", "bfloat16"), "engine.dtype", self.dtype, "float32 or bfloat16")
        _check_numbers("engine", self, "port", 0, 65535)
        _check_numbers("engine", self, "max_running max_total_tokens concurrency", 1)
        _check_numbers("engine", self, "threads retries restarts", 0)
        _check_numbers("engine", self, "timeout_s start_timeout_s", 0, above=True)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How hosted episodes and evaluation draw tokens."""

    temperature: float = 0.7
    max_new_tokens: int = 32
    """Of one reply."""

    def __post_init__(self) -> None:
        _check_numbers("sampling", self, "temperature", 0, above=True)
        _check_numbers("sampling", self, "max_new_tokens", 1)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How next states become advantages."""

    name: str = "stepwise"
    outcome_weight: float = 1.0
    """Of the verified outcome, mapped to [-1, 1]."""
    process_weight: float = 1.0
    """Of the judge's mean vote for a turn."""
    std_floor: float = 1e-6
    """Added to the standard deviation of a bucket."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    """Cap of the truncated importance ratio between trainer and engine."""
    outlier_logratio: float = 5.0
    """Tokens whose |log pi_old - log mu| exceeds this are masked, counted and reported."""
    kl_coef: float = 0.01
    """Weight of the k3 estimate of KL to the base weights."""
    cut_reply: str = "mask"
    """`mask` or `penalise` (value -1): what happens to replies that are cut, empty or looping."""

    def __post_init__(self) -> None:
        _check(self.cut_reply in ("mask", "penalise"), "method.cut_reply", self.cut_reply, "mask or penalise")
        _check_numbers("method", self, "outcome_weight process_weight kl_coef", 0)
        _check_numbers("method", self, "std_floor clip_high outlier_logratio", 0, above=True)
        _check_numbers("method", self, "clip_low", 0, 1, above=True)
        _check_numbers("method", self, "tis_cap", 1)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The optimizer and its batches."""

    kind: str = "lora"
    """`lora` or `full`."""
    steps: int = 24
    groups_per_step: int = 8
    group_size: int = 8
    """Tries of one task; they are compared with each other."""
    max_staleness: int = 1
    """Versions between the oldest trained token and the trainer's weights; 0 is synchronous training."""
    lr: float = 5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    lora_rank: int = 16
    lora_alpha: int = 32
    freeze_embeddings: bool = True
    """With kind=full: token embeddings (and the tied head) stay."""
    dtype: str = "bfloat16"
    """Of the forward pass; masters and optimizer are float32."""
    tokens_per_micro_batch: int = 4096
    """Packed tokens of one forward and backward pass."""
    minibatches: int = 1
    """Optimizer updates a step; 1 needs no separate pass for the old log-probabilities."""
    num_ranks: int = 1
    threads: int = 0
    """Of each rank; 0 is an equal share of the trainer's cores."""
    checkpoint_every_steps: int = 1
    checkpoint_every_minutes: float = 10.0
    """With kind=full: whichever comes first."""
    keep_checkpoints: int = 2
    start_timeout_s: float = 180.0
    step_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        _check(self.kind in ("lora", "full"), "trainer.kind", self.kind, "lora or full")
        _check(self.dtype in ("float32", "bfloat16"), "trainer.dtype", self.dtype, "float32 or bfloat16")
        compared = "at least 2: a try is compared with the others of its group"
        _check(self.group_size >= 2, "trainer.group_size", self.group_size, compared)
        _check_numbers("trainer", self, "groups_per_step lora_rank lora_alpha tokens_per_micro_batch", 1)
        _check_numbers("trainer", self, "minibatches num_ranks checkpoint_every_steps keep_checkpoints", 1)
        _check_numbers("trainer", self, "steps max_staleness lr weight_decay warmup_steps threads", 0)
        _check_numbers("trainer", self, "beta1 beta2", 0, 1)
        _check_numbers("trainer", self, "max_grad_norm checkpoint_every_minutes", 0, above=True)
        _check_numbers("trainer", self, "start_timeout_s step_timeout_s", 0, above=True)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Limits above which training halts."""

    mismatch_max_abs: float | None = None
    """Largest |log pi_old - log mu| over tokens of the trainer's own version; None: see `resolved_guards`."""
    mismatch_k3: float | None = None
    """k3 of the same tokens; above it `mismatch_patience` batches in a row halt training. None as above."""
    mismatch_patience: int = 3
    invalid_share: float = 0.5
    """Episodes lost to infrastructure, over the last `window` episodes."""
    judge_failed_share: float = 0.5
    """Turns whose judge failed, over the last `window` turns."""
    cut_share: float = 0.9
    """Replies that were cut, empty or looping, over the last `window` turns."""
    window: int = 128
    """Nothing is halted before this many were seen."""
    stall_s: float = 1800.0
    """Seconds without a batch after which training halts and says what it waits for."""
    engine_failures: int = 16
    """Episodes lost to the engine in a row."""

    def __post_init__(self) -> None:
        _check_numbers("guards", self, "mismatch_max_abs mismatch_k3 stall_s", 0, above=True)
        _check_numbers("guards", self, "invalid_share judge_failed_share cut_share", 0, 1)
        _check_numbers("guards", self, "mismatch_patience window engine_failures", 1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out scores: before, during and after training."""

    tasks: int = 96
    """Held-out tasks of the trained families; each is tried once."""
    heldout_tasks: int = 32
    """Tasks of families never trained on; reported beside, not optimised."""
    every_steps: int = 0
    """0 evaluates before and after only."""
    quick_tasks: int = 32
    """Tasks of an evaluation between."""

    def __post_init__(self) -> None:
        _check_numbers("eval", self, "tasks heldout_tasks every_steps quick_tasks", 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on; written to the run folder."""

    model: ModelConfig
    streams: list[StreamConfig]
    engine: EngineConfig
    judge: dict[str, Any]
    """`_target_` and keyword arguments of a `protocols.Judge`."""
    method: MethodConfig
    trainer: TrainerConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0
    reward: str = "verified"
    """`verified`, or `shuffled`: step values are permuted over the batch's trajectories (negative control)."""
    run_dir: str | None = None
    """Where the run is written; None makes runs/<time>-<name>."""
    resume: str | None = None
    """Run folder to go on with; its configuration is used."""

    def __post_init__(self) -> None:
        _check(self.reward in ("verified", "shuffled"), "reward", self.reward, "verified or shuffled")
        if not self.streams:
            raise ConfigError("streams is empty: give at least one, for example env=terminal")
        names = [s.name for s in self.streams]
        if len(set(names)) != len(names):
            raise ConfigError(f"streams have equal names: {names}; give each a `name`")
        for section, kind, names in _UNUSED:
            _refuse_unused(section, getattr(self, section), kind, names)


_OWN_SERVER = "port max_running max_total_tokens threads start_timeout_s restarts"
_UNUSED = (
    ("engine", "url", _OWN_SERVER),
    ("engine", "embedded", "api_key_env"),
    ("engine", "scripted", "api_key_env"),
    ("trainer", "lora", "freeze_embeddings checkpoint_every_minutes"),
    ("trainer", "full", "lora_rank lora_alpha"),
)
"""Section, kind, and the keys that have no effect with that kind."""


def _refuse_unused(section: str, config: EngineConfig | TrainerConfig, kind: str, names: str) -> None:
    for name in names.split() if config.kind == kind else ():
        value = getattr(config, name)
        if value != type(config).__dataclass_fields__[name].default:
            raise ConfigError(f"{section}.{name}={value!r} has no effect with {section}.kind={kind}: leave it out")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def resolved_guards(config: TrainConfig) -> GuardConfig:
    """The guards with the mismatch limits of the run's number formats where the configuration leaves them open.

    Where engine and trainer both compute in float32, the same weights give the same log-probabilities: 1e-3 nats on any
    token, k3 1e-8. With bfloat16 on either side only the mean is bounded, k3 1e-2.
    """
    guards, exact = config.guards, config.engine.dtype == config.trainer.dtype == "float32"
    worst, k3 = (1e-3, 1e-8) if exact else (None, 1e-2)
    return dataclasses.replace(
        guards,
        mismatch_max_abs=worst if guards.mismatch_max_abs is None else guards.mismatch_max_abs,
        mismatch_k3=k3 if guards.mismatch_k3 is None else guards.mismatch_k3,
    )


def to_config(raw: Mapping[str, Any]) -> TrainConfig:
    """Checks a composed configuration (plain containers) against the schema and freezes it.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a wrong type or a value out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw = dict(raw)
    env = raw.pop("env", None)
    if env is not None:
        if raw.get("streams"):
            raise ConfigError("env and streams are both given: take the environment away, e.g. with ~env=terminal")
        raw["streams"] = [env]
    _reject_unknown(raw, {f.name for f in dataclasses.fields(TrainConfig)} | _GROUP_NAMES, "")
    sections: dict[str, Any] = {}
    for f in dataclasses.fields(TrainConfig):
        if f.name not in raw:
            continue
        value = raw[f.name]
        schema = _SECTIONS.get(f.name)
        if schema is not None:
            sections[f.name] = _structured(schema, value, f.name)
        elif f.name == "streams":
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ConfigError(f"streams={value!r} is not a list of streams")
            rows = cast(Sequence[Any], value)
            sections[f.name] = [_structured(StreamConfig, row, f"streams[{i}]") for i, row in enumerate(rows)]
        else:
            sections[f.name] = value
    try:
        plain = OmegaConf.structured(_Plain)
        merged = OmegaConf.merge(plain, {k: v for k, v in sections.items() if k in _PLAIN_KEYS})
        sections.update(cast(dict[str, Any], OmegaConf.to_container(merged)))
        return TrainConfig(**sections)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    except TypeError as error:
        raise ConfigError(f"configuration incomplete: {error}") from None


@dataclass
class _Plain:
    judge: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    reward: str = "verified"
    run_dir: str | None = None
    resume: str | None = None


_GROUP_NAMES = {"env", "experiment"}
"""Configuration groups that are no field of their own: suggested for a mistyped key."""
_PLAIN_KEYS = {f.name for f in dataclasses.fields(_Plain)}
_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "method": MethodConfig,
    "trainer": TrainerConfig,
    "sampling": SamplingConfig,
    "guards": GuardConfig,
    "eval": EvalConfig,
}


def _structured(schema: type, value: Any, key: str) -> Any:
    """Merges `value` onto the dataclass `schema` and makes the object."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r} is not a mapping")
    row = cast(Mapping[str, Any], value)
    _reject_unknown(row, {f.name for f in dataclasses.fields(schema)}, f"{key}.")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(row)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}.{error.full_key or error.key}: {str(error).splitlines()[0]}") from None


def _reject_unknown(row: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for name in row:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid keys: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {prefix}{name}: {hint}")


def build(node: Mapping[str, Any], key: str) -> Any:
    """Makes the object a plug-in node describes: `{"_target_": "pkg.mod.Class", **kwargs}`.

    Keyword arguments are checked against the signature and, where it is annotated with str, int, float or bool,
    against the type.

    Raises:
        ConfigError: no such target, an unknown or missing argument or a wrong type, named with `key`.
    """
    target = node.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"{key}._target_={target!r} is not a dotted name")
    module_name, _, name = target.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module_name), name)
        parameters = inspect.signature(factory).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}._target_={target!r} cannot be used: {error}") from None
    kwargs = {k: v for k, v in node.items() if k != "_target_"}
    _reject_unknown(kwargs, set(parameters), f"{key}.")
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in kwargs]
    if missing:
        raise ConfigError(f"{key} lacks {', '.join(missing)}: {target} needs it")
    for k, v in kwargs.items():
        want = parameters[k].annotation
        if want in (str, int, float, bool) and not (type(v) is want or (want is float and type(v) is int)):
            raise ConfigError(f"{key}.{k}={v!r} is not of type {want.__name__}")
    return factory(**kwargs)
