"""Everything that can be wrong before a process is started is found here, and said in one line.

In: a checked configuration. Out: the model folder, the renderer, the judge, and the specifications of both children.
Finding the model may download or convert it; nothing else is written.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_envs.errors import ClawEnvError
from claw_train.config import StreamConfig, TrainConfig, build, resolved_guards
from claw_train.errors import ConfigError
from claw_train.hosting.episode import opening_messages
from claw_train.hosting.host import EnvHost, EpisodeStart
from claw_train.models import ModelFolder, Tokenizer, check_fits, find_model
from claw_train.protocols import Judge, Renderer
from claw_train.serving.render import Renderer as TemplateRenderer
from claw_train.serving.server import EngineLaunch
from claw_train.training.spec import TrainerSpec
from claw_train.types import Version

_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
"""Where a chat template may be, in the order in which it is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a run is made of, checked."""

    config: TrainConfig
    model: ModelFolder
    renderer: Renderer
    judge: Judge

    @classmethod
    def check(cls, config: TrainConfig) -> "Preflight":
        """Checks memory, judge, environments and model, cheapest first.

        Raises:
            ConfigError: names the key and the fix.
            ModelError: the weights cannot be had.
        """
        check_fits(config.model, config.engine, config.trainer)
        judge = build(config.judge, "judge")
        starts = {stream.name: _open(stream) for stream in config.streams}
        model = find_model(config.model)
        renderer = TemplateRenderer(model.tokenizer_path, thinking=config.model.thinking)
        for name, start in starts.items():
            _check_room(config, name, len(renderer.start(opening_messages(start))))
        return cls(config=config, model=model, renderer=renderer, judge=judge)

    def trainer_spec(self, run_dir: Path) -> TrainerSpec:
        """What the trainer ranks are started with."""
        config = self.config
        return TrainerSpec(
            model_path=str(self.model.path),
            run_dir=str(run_dir),
            trainer=config.trainer,
            method=config.method,
            guards=resolved_guards(config),
            lora_targets=tuple(config.model.lora_targets),
            weights_dtype=config.engine.dtype,
            seed=config.seed,
        )

    def engine_launch(self, base: Version, work: Path, threads: int) -> EngineLaunch:
        """What the engine server is started with."""
        config = self.config
        return EngineLaunch(
            config=config.engine,
            model=self.model.path,
            context=config.model.context,
            max_lora_rank=config.trainer.lora_rank,
            base_version=str(base),
            seed=config.seed,
            threads=config.engine.threads or threads,
            work=work,
        )

    def facts(self) -> Mapping[str, Any]:
        """For the manifest: seeds, where the base weights came from, and what their tokenizer and template are."""
        model, folder = self.config.model, self.model.tokenizer_path
        template = next((f for f in map(folder.joinpath, _TEMPLATE_FILES) if f.is_file()), None)
        return {
            "seed": self.config.seed,
            "reward": self.config.reward,
            "model": {
                "name": model.name,
                "source": self.model.source,
                "path": str(self.model.path),
                **{name: getattr(model, name) for name in ("hub_id", "wheel", "wheel_file", "wheel_sha256")},
            },
            "tokenizer": {
                "path": str(folder),
                "fingerprint": Tokenizer(folder).fingerprint,
                "template_file": None if template is None else template.name,
                "template_sha256": None if template is None else hashlib.sha256(template.read_bytes()).hexdigest(),
            },
        }


def _open(stream: StreamConfig) -> EpisodeStart:
    """Plays a reset, so that a missing sandbox or a wrong argument shows before any model is loaded.

    Raises:
        ConfigError: names the stream, and the key where there is one.
    """
    where = f"streams.{stream.name}"
    _check_deadline(stream, stream.kwargs.get("timeout_s"))
    try:
        start, command_timeout_s = asyncio.run(_reset(stream))
    except ClawEnvError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check_deadline(stream, command_timeout_s)
    if not start.valid:
        raise ConfigError(
            f"{where}: {stream.id} cannot start an episode here: {start.failure_kind or 'no reason given'}; "
            "see claw doctor"
        )
    return start


async def _reset(stream: StreamConfig) -> tuple[EpisodeStart, float | None]:
    host = EnvHost(stream)
    try:
        return await host.reset(seed=0, options={"split": "train"}), host.command_timeout_s
    finally:
        await host.close()


def _check_deadline(stream: StreamConfig, timeout_s: object) -> None:
    """A command that may take longer than its step would cost its environment every time it does."""
    if isinstance(timeout_s, (int, float)) and timeout_s >= stream.deadline_s:
        raise ConfigError(
            f"streams.{stream.name}.kwargs.timeout_s={timeout_s:g} is not below "
            f"streams.{stream.name}.deadline_s={stream.deadline_s:g}: raise deadline_s"
        )


def _check_room(config: TrainConfig, name: str, prompt_tokens: int) -> None:
    """An episode whose first prompt leaves no room for a reply ends before it begins."""
    need = prompt_tokens + config.sampling.max_new_tokens
    for key, limit in (
        ("model.context", config.model.context),
        ("engine.max_total_tokens", config.engine.max_total_tokens),
    ):
        if need > limit:
            raise ConfigError(
                f"sampling.max_new_tokens={config.sampling.max_new_tokens} and the {prompt_tokens} tokens of "
                f"streams.{name}'s opening prompt exceed {key}={limit}"
            )
