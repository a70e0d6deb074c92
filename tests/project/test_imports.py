"""What an import loads, seen in a fresh interpreter: lazy imports and chains that a linter of imports cannot see."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "sglang"}
HEAVY = MODEL_LIBRARIES | {"docker", "playwright", "pyautogui", "ray", "datasets", "matplotlib"}
CHILDREN = {"engine", "losses", "training"}
"""Run as processes of their own, with torch."""


def loaded_after(code: str) -> set[str]:
    """Names of all modules in a fresh interpreter that ran `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def modules_of(package: str) -> set[str]:
    """Top-level modules and packages of ours, without the dots."""
    folder = ROOT / package
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return packages | {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_environments_load_nothing_heavy():
    loaded = loaded_after("import claw_envs")
    assert "gymnasium" in loaded
    assert loaded & (HEAVY | {"claw_train", "pydantic", "httpx"}) == set()


def test_environments_register_their_ids_without_loading_them():
    loaded = loaded_after("import claw_envs, gymnasium; gymnasium.spec('ClawTerminal-v0')")
    assert not [name for name in loaded if name.startswith(("claw_envs.terminal", "claw_envs.sandbox"))]


def test_a_terminal_loads_no_model_library_and_no_trainer():
    loaded = loaded_after("import claw_envs.terminal.env")
    assert loaded & (HEAVY | {"claw_train"}) == set()


def test_the_doctor_loads_nothing_heavy():
    loaded = loaded_after("from claw_envs.cli import main; main(['doctor'])")
    assert "claw_train.models.memory" in loaded
    assert loaded & HEAVY == set()


def test_the_training_process_loads_no_model_library():
    ours = sorted(modules_of("claw_train") - CHILDREN - {"__main__"})
    loaded = loaded_after("\n".join(f"import claw_train.{module}" for module in ours))
    assert "claw_train.run" in loaded
    assert loaded & MODEL_LIBRARIES == set()


def test_help_loads_neither_orchestrator_nor_web_server():
    loaded = loaded_after("from claw_train.cli import main\ntry: main(['--help'])\nexcept SystemExit: print()")
    assert loaded & (HEAVY | {"claw_train.run", "fastapi", "uvicorn", "hydra"}) == set()


def contracts() -> dict[str, dict]:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["name"]: contract for contract in lint["contracts"]}


def test_every_module_of_the_training_process_is_kept_from_torch():
    contract = contracts()["the claw-train process never imports torch"]
    assert set(contract["forbidden_modules"]) == MODEL_LIBRARIES
    assert set(contract["source_modules"]) == {f"claw_train.{m}" for m in modules_of("claw_train") - CHILDREN}


def test_the_trainer_is_kept_from_all_of_an_environment_but_its_border():
    contract = contracts()["the trainer knows of environments only their types, errors and command line"]
    border = {"types", "errors", "doctor", "cli"}
    assert set(contract["forbidden_modules"]) == {f"claw_envs.{m}" for m in modules_of("claw_envs") - border}
