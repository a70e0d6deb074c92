"""House rules that a machine can check and the linters do not."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("claw_envs", "claw_train", "benchmarks")
MAX_FILE, MAX_FUNCTION = 500, 80
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKING = {"run", "call", "check_call", "check_output"}
"""Functions of `subprocess` that wait and take a timeout."""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; what is neither counts as empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def where(path: Path, node: ast.AST | int) -> str:
    line = node if isinstance(node, int) else node.lineno  # type: ignore[attr-defined]
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_file_is_longer_than_it_may_be():
    long = [
        f"{where(p, n)} lines" for p in sources(*PACKAGES, "tests") if (n := len(p.read_text().splitlines())) > MAX_FILE
    ]
    assert long == []


def test_no_function_is_longer_than_it_may_be():
    long = [
        where(path, node)
        for path in sources(*PACKAGES)
        for node in nodes(path)
        if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION
    ]
    assert long == []


def lets_pass(guarded: ast.Try, handler: ast.ExceptHandler) -> bool:
    """True of a handler that only cleans up: it raises again, or the process ends there."""
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return raises_again or any(isinstance(n, ast.Call) and dotted(n.func) == "os._exit" for n in ast.walk(guarded))


def test_only_the_boundary_catches_everything():
    broad = [
        where(path, handler)
        for path in sources(*PACKAGES)
        for node in nodes(path)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if (handler.type is None or dotted(handler.type) in ("Exception", "BaseException"))
        and not lets_pass(node, handler)
    ]
    assert [place for place in broad if not place.startswith("claw_train/errors.py")] == []
    assert len(broad) == 1


def test_nothing_is_unpickled():
    names = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    imported = [
        where(path, node)
        for path in sources(*PACKAGES)
        for node in nodes(path)
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] in names for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in names)
    ]
    called = [
        where(path, call)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if name in ("torch.load", "torch.save") or any(k.arg == "allow_pickle" for k in call.keywords)
    ]
    assert imported + called == []


def test_no_command_goes_through_a_shell_of_ours():
    through = [
        where(path, call)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if name in ("os.system", "os.popen")
        or any(k.arg == "shell" and dotted(k.value) != "False" for k in call.keywords)
    ]
    assert through == []


def test_programs_we_wait_for_have_a_deadline():
    endless = [
        where(path, call)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if name.startswith("subprocess.")
        and name.split(".")[1] in BLOCKING
        and not any(k.arg == "timeout" for k in call.keywords)
    ]
    assert endless == []


def test_deadlines_do_not_swallow_cancellation():
    """asyncio.wait_for of Python 3.11 returns a result that came with a cancellation, and the task runs on for ever."""
    swallowing = [
        where(path, call) for path in sources(*PACKAGES) for name, call in calls(path) if name == "asyncio.wait_for"
    ]
    assert swallowing == []


def test_queues_are_bounded():
    endless = [
        where(path, call)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if (name.split(".")[-1] in ("Queue", "PriorityQueue", "LifoQueue") and not call.args and not call.keywords)
        or name.split(".")[-1] == "SimpleQueue"
    ]
    assert endless == []


def test_only_command_lines_set_logging_up():
    loud = [where(p, call) for p in sources(*PACKAGES) for name, call in calls(p) if name == "logging.basicConfig"]
    assert [place for place in loud if not place.startswith("claw_train/log.py")] == []


def test_servers_bind_the_loopback():
    """Refusals and checks of an address may name it; an argument or default may not be it."""
    wide = [
        where(path, value)
        for path in sources(*PACKAGES)
        for node in nodes(path)
        for value in [*(k.value for k in getattr(node, "keywords", [])), *getattr(node, "defaults", [])]
        if isinstance(value, ast.Constant) and value.value in ("0.0.0.0", "::")
    ]
    assert wide == []


def test_no_work_is_left_for_later_in_the_packages():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        where(path, n)
        for path in sources(*PACKAGES)
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert left == []


def called(function: ast.AST) -> set[str]:
    """Last names of everything a function calls."""
    return {dotted(node.func).split(".")[-1] for node in ast.walk(function) if isinstance(node, ast.Call)}


def is_named_for_it(name: str) -> bool:
    """True of what asserts by its name: pytest's own, torch's and `claw_envs.testing.check_...`."""
    return name in ("raises", "warns", "fail") or name.startswith(("check_", "assert_"))


def checkers(functions: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> set[str]:
    """Names of helpers that assert, or call something that does."""
    names = {f.name for f in functions if any(isinstance(node, ast.Assert) for node in ast.walk(f))}
    while more := {f.name for f in functions if f.name not in names and able(called(f), names)}:
        names |= more
    return names


def able(calls: set[str], helpers: set[str]) -> bool:
    return bool(calls & helpers) or any(map(is_named_for_it, calls))


def test_every_test_can_fail():
    functions = [(path, node) for path in sources("tests") for node in nodes(path) if isinstance(node, FUNCTIONS)]
    helpers = checkers([node for _, node in functions if not node.name.startswith("test_")])
    idle = [
        f"{where(path, node)} {node.name}"
        for path, node in functions
        if node.name.startswith("test_")
        and not any(isinstance(n, ast.Assert) for n in ast.walk(node))
        and not able(called(node), helpers)
    ]
    assert idle == []


def naps(node: ast.AST, in_loop: bool = False) -> Iterator[ast.Call]:
    """Sleeps that wait for luck: not in a loop (that is a poll), not 0 and not a minute (that is to stay alive)."""
    in_loop = in_loop or isinstance(node, (ast.While, ast.For, ast.AsyncFor))
    if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "asyncio.sleep") and not in_loop:
        pause = node.args[0]
        if not (isinstance(pause, ast.Constant) and (pause.value == 0 or pause.value >= 60)):
            yield node
    for child in ast.iter_child_nodes(node):
        yield from naps(child, in_loop)


def test_no_test_sleeps_for_luck():
    """A comment on the line may give the reason why the length of a pause is the case under test."""
    lucky = [
        where(path, call)
        for path in sources("tests")
        for call in naps(nodes(path)[0])
        if "#" not in path.read_text().splitlines()[call.lineno - 1]
    ]
    assert lucky == []


def test_the_changelog_knows_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "README.md", "Makefile", ".ci/run"])
def test_the_project_has_its_papers(name):
    assert len((ROOT / name).read_text().splitlines()) > 15


def test_the_licence_is_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licence = (ROOT / "LICENSE").read_text()
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_one_variable_names_the_torch_version():
    pinned = [
        path.name
        for path in [
            ROOT / "Makefile",
            ROOT / "pyproject.toml",
            ROOT / ".ci/run",
            *sorted((ROOT / "scripts").iterdir()),
        ]
        if path.is_file() and re.search(r"torch==\d", path.read_text())
    ]
    assert pinned == ["Makefile"]
