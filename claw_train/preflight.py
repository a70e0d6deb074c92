"""Everything that can be wrong before a process is started is found here, and said in one line.

In: a checked configuration. Out: the model folder, the renderer, the judge, and the specifications of both children.
Finding the model may download or convert it; nothing else is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_envs.errors import ClawEnvError
from claw_train.config import TrainConfig, build
from claw_train.errors import ConfigError
from claw_train.hosting.host import make_env
from claw_train.models import ModelFolder, check_fits, find_model
from claw_train.protocols import Judge, Renderer
from claw_train.serving.render import Renderer as TemplateRenderer
from claw_train.serving.server import EngineLaunch
from claw_train.training.spec import TrainerSpec
from claw_train.types import Version


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
        for stream in config.streams:
            _try_env(config, stream.name)
        model = find_model(config.model)
        return cls(
            config=config,
            model=model,
            renderer=TemplateRenderer(model.tokenizer_path, thinking=config.model.thinking),
            judge=judge,
        )

    def trainer_spec(self, run_dir: Path) -> TrainerSpec:
        """What the trainer ranks are started with."""
        config = self.config
        return TrainerSpec(
            model_path=str(self.model.path),
            run_dir=str(run_dir),
            trainer=config.trainer,
            method=config.method,
            guards=config.guards,
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
        """For the manifest."""
        return {
            "seed": self.config.seed,
            "reward": self.config.reward,
            "model": {"name": self.config.model.name, "source": self.model.source, "path": str(self.model.path)},
        }


def _try_env(config: TrainConfig, name: str) -> None:
    """Plays a reset, so that a missing sandbox or a wrong argument shows before any model is loaded."""
    stream = next(s for s in config.streams if s.name == name)
    env = make_env(stream)
    try:
        _, info = env.reset(seed=0, options={"split": "train"})
        if not info["valid"]:
            raise ConfigError(
                f"streams.{name}: {stream.id} cannot start an episode here: {info['failure_kind']}; see claw doctor"
            )
    except ClawEnvError as error:
        raise ConfigError(f"streams.{name}: {error}") from None
    finally:
        env.close()
