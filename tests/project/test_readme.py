"""What README says to type works, and what it says is there is there."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every line of every shell block, split into words, comments left out."""
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    return [words for words in lines if words]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_readme_has_the_blocks_that_are_checked_here():
    assert len(blocks("python")) >= 1
    assert {words[0] for words in commands()} >= {"make", "claw", "claw-train", "pip"}


@pytest.mark.sandbox
@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_a_python_block_runs_as_pasted(block):
    done = run(sys.executable, "-W", "error", "-c", block)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_gymnasium_loop_is_twelve_lines_at_most():
    assert len(blocks("python")[0].splitlines()) <= 12


def test_every_command_is_one_that_exists():
    scripts = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
    assert {words[0] for words in commands()} <= scripts | {"make", "pip"}


def test_every_make_target_exists():
    wanted = {words[1] for words in commands() if words[0] == "make"}
    wanted |= set(re.findall(r"`make ([a-z-]+)", README + CONTRIBUTING))
    wanted |= set(re.findall(r"^ {4}make ([a-z-]+)", CONTRIBUTING, re.MULTILINE))
    assert {"demo", "test", "check"} <= wanted
    assert wanted - targets() == set()


@pytest.mark.parametrize(
    "words", [w for w in commands() if w[0] == "claw-train" and "--help" not in w], ids=lambda words: " ".join(words)
)
def test_every_configuration_that_is_shown_is_valid(words):
    done = run(sys.executable, "-m", "claw_train", *[w for w in words[1:] if w != "--cfg"], "--cfg")
    assert done.returncode == 0, done.stderr
    assert "trainer:" in done.stdout


def test_every_extra_that_is_named_exists():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {extra for group in re.findall(r"\.\[([a-z,]+)\]", README + CONTRIBUTING) for extra in group.split(",")}
    assert named
    assert named <= extras


def tree() -> list[Path]:
    """The paths of the folder tree: two spaces are one level, names come before the first run of spaces."""
    block = next(block for block in blocks("") if block.startswith("claw_envs/"))
    paths: list[Path] = []
    top = Path()
    for line in block.splitlines():
        names = re.split(r" {3,}", line.strip())[0].split()
        if line.startswith("  "):
            paths += [top / name for name in names]
        else:
            top = Path(names[0])
            paths.append(top)
    return paths


def test_the_folder_tree_is_on_disk():
    assert len(tree()) > 15
    assert [str(path) for path in tree() if not (ROOT / path).exists()] == []


def test_the_folder_tree_leaves_no_package_out():
    shown = {ROOT / path for path in tree()}
    packages = {init.parent for top in ("claw_envs", "claw_train") for init in (ROOT / top).glob("*/__init__.py")}
    assert sorted(str(p.relative_to(ROOT)) for p in packages - shown) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(name):
    text = re.sub(r"<!--.*?-->", "", (ROOT / name).read_text(), flags=re.DOTALL)
    files = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in files if not (ROOT / link).exists()] == []


def test_the_figures_of_results_name_their_record():
    rows = [row.strip("|").split("|") for row in re.findall(r"^\|.*\|$", README, re.MULTILINE)]
    named = [name for row in rows[2:] for name in re.findall(r"`(benchmarks/[^`]+)`", row[-1])]
    assert rows
    assert [name for name in named if not (ROOT / name).exists()] == []
