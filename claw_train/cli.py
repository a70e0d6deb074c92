"""The command line `claw-train`: compose, check, run; errors the user can mend are one line and exit code 2.

    claw-train                                  trains smollm2-135m on ClawTerminal-v0
    claw-train env=terminal model=tiny trainer.steps=4
    claw-train resume=runs/20260301-terminal    goes on with a run
    claw-train reward=shuffled                  negative control
    claw-train --cfg                            prints the resolved configuration

Heavy imports come after parsing, so `--help` is instant. Never imports torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claw_train.config import TrainConfig, conf_dir, to_config
from claw_train.errors import ClawTrainError, ConfigError, StoppedError

_PATHS = frozenset({"run_dir", "resume", "model.path", "engine.script"})
"""Keys whose values may hold any character that a path may."""

EXIT_STOPPED = 1
"""Training stopped: a guard, or a part that failed while it ran."""
EXIT_USAGE = 2
"""Nothing was run: something the user can mend."""
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    try:
        if args.cfg and "job" in args.overrides:  # Hydra's spelling, `--cfg job`
            args.overrides.remove("job")
        raw = compose(args.overrides, args.config_dir)
        if args.cfg:
            _print_config(to_config(raw))
            return 0
        return _run(raw, args.overrides)
    except KeyboardInterrupt as interrupt:
        _say(str(interrupt) or "interrupted before the run began")
        return EXIT_INTERRUPTED
    except StoppedError as error:
        _say(" ".join(str(error).split()))
        return EXIT_STOPPED
    except ClawTrainError as error:
        _say(_one_line(error))
        return EXIT_USAGE


def _run(raw: dict[str, Any], overrides: Sequence[str]) -> int:
    try:
        from claw_train.run import launch
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'claw-rl[train]'") from None
    return launch(raw, overrides)


def compose(overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """Plain containers composed by Hydra from `conf/` (and `config_dir`), with `overrides` applied.

    Raises:
        ConfigError: an unknown group, option or malformed override.
    """
    try:
        import hydra
        import yaml
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'claw-rl[train]'") from None
    folder = conf_dir()
    groups = {p.name for p in folder.iterdir() if p.is_dir()}
    lines = [_override(text, groups) for text in overrides]
    if config_dir is not None:
        extra = Path(config_dir).resolve()
        if not extra.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such folder")
        lines.append(f"hydra.searchpath=[{_quoted(f'file://{extra}')}]")
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3", job_name="claw-train"):
            config = hydra.compose("config", overrides=lines)
        raw = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    assert isinstance(raw, dict)
    settings = {str(k): v for k, v in raw.items()}
    asked = any(text.startswith(("env=", "env.")) for text in overrides)
    if settings.get("streams") and not asked:
        settings.pop("env", None)  # the default environment gives way to a list of streams
    return settings


def _override(text: str, groups: set[str]) -> str:
    """Hydra's own spelling of one override: keys are set whether the YAML names them or not, the schema checks them."""
    key, equals, value = text.partition("=")
    if not equals or not key or text.startswith("-"):
        raise ConfigError(f"{text!r} is not key=value; see claw-train --help")
    if key in groups - {"experiment"} and value in ("", "null"):
        raise ConfigError(f"{text!r}: choose one of conf/{key}/, see claw-train --help")
    if key.startswith(("+", "~", "hydra.")) or key in groups or "@" in key:
        return text
    if key in _PATHS and value not in ("", "null"):
        return f"++{key}={_quoted(str(Path(value).expanduser()))}"
    return f"++{text}"


def _quoted(text: str) -> str:
    """A string that Hydra takes as it is, whatever characters it holds."""
    if text[:1] == text[-1:] == "'" and len(text) > 1:
        return text  # quoted by hand already
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="claw-train",
        description="Train a language-model agent from what happens next.",
        epilog=_help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, see below")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own YAML, laid out like conf/")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    return parser


def _help_text() -> str:
    folder = conf_dir()
    lines = ["choices (group=option):"]
    for group in sorted(p for p in folder.iterdir() if p.is_dir()):
        options = sorted(p.stem for p in group.glob("*.yaml"))
        if options:
            lines.append(f"  {group.name:<12} {', '.join(options)}")
    lines += [
        "",
        "common keys:",
        "  trainer.steps=N  trainer.lr=X  trainer.max_staleness=N  trainer.groups_per_step=N  trainer.group_size=N",
        "  sampling.temperature=X  eval.tasks=N  seed=N  reward=shuffled  run_dir=DIR  resume=RUN",
        "",
        "every key with its type and meaning: claw_train/config.py; all values: claw-train --cfg",
    ]
    return "\n".join(lines)


def _print_config(config: TrainConfig) -> None:
    from dataclasses import asdict

    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), end="")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _say(text: str) -> None:
    print(f"claw-train: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
