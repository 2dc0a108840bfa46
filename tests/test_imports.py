"""Who may import whom: the pure core does no I/O, nodes get the standard library only, and `--help` stays light."""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import homelab
from homelab.controller.remote import ship
from homelab.shared.protocol.code import SHIPPED_ROOMS, shipped_files

ROOT = Path(homelab.__file__).parent
CONTROLLER = ROOT / "controller"
# Rooms without I/O, except these files; in every other room a module without it says "Pure." in its docstring.
PURE_ROOMS = {
    "base": {"links.py", "package.py"}, "config": {"load.py", "near_files.py", "suite.py"}, "facts": set(), "planning": set(), "launchers": set(),
    "diagnose": set(), "checks": set(), "dashboard": {"live.py", "interactive.py", "keyboard.py"},
}  # fmt: skip


def pure() -> list[Path]:
    """The modules that do no I/O: by their room, or by their own word."""
    by_room = [path for room, impure in PURE_ROOMS.items() for path in sorted((CONTROLLER / room).rglob("*.py")) if path.name not in impure]
    by_word = [path for path in sorted(CONTROLLER.rglob("*.py")) if re.search(r"\bPure[.:]", ast.get_docstring(parsed(path)) or "")]
    return list(dict.fromkeys([*by_room, *by_word]))


DOES_IO = {
    "subprocess", "socket", "paramiko", "fabric", "invoke", "os", "shutil", "tempfile", "glob", "asyncio", "threading", "selectors",
    "urllib.request", "http", "ssl", "signal", "multiprocessing", "random",
}  # fmt: skip
HEAVY = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "safetensors", "numpy")
# Python's own list has none of what was added after 3.9.
AFTER_39 = {"tomllib", "graphlib.nothing"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, *, only_at_top: bool = False) -> tuple[tuple[str, int], ...]:
    """(module, line) of all imports of a file; not those for type checkers."""
    return tuple(_imports(path, only_at_top))


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All statements at every depth, without the expressions, which are most of a tree; not those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from statements(getattr(node, part, ()))


def _imports(path: Path, only_at_top: bool) -> Iterator[tuple[str, int]]:
    body = parsed(path).body
    for node in body if only_at_top else statements(body):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


# They read files, and the pure core has values and functions of texts from them: `Suite`, `parse_cluster`.
VALUES = ("load.py", "suite.py")
READS_OR_WRITES = {"read_text", "write_text", "read_bytes", "write_bytes", "unlink", "mkdir", "exists", "is_file", "is_dir"}
# "Now" is an argument of the pure core, never asked for.
ASKS = {"open", "print", "input", "time.time", "time.monotonic", "time.sleep", "datetime.now", "datetime.datetime.now"}


def test_the_pure_core_does_no_io() -> None:
    """Nor does it import a module of ours that does."""
    core, found = pure(), []
    ours = {
        f"homelab.{label(path)[:-3].replace('/', '.')}"
        for path in sorted(ROOT.rglob("*.py"))
        if path not in core and path.name not in ("__init__.py", *VALUES)
    }
    for path in core:
        found += [
            f"{path}:{line}: {module}"
            for module, line in imports(path)
            if within(module, DOES_IO) or (module in ours and "shared" not in module)
        ]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ASKS or called.rpartition(".")[2] in READS_OR_WRITES:
                    found.append(f"{path}:{node.lineno}: {called}()")
    assert not found, "\n".join(found)


AGENT = [*(path for room in ("node", "shared/protocol") for path in sorted((ROOT / room).rglob("*.py"))), ROOT / "shared" / "markers.py"]


def test_the_agent_is_old_python_and_the_standard_library() -> None:
    found = []
    for path in AGENT:
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        for module, line in imports(path):
            top = module.split(".")[0]
            is_ours = module in ("homelab", "homelab.shared") or within(
                module, {"homelab.node", "homelab.shared.protocol", "homelab.shared.markers"}
            )
            if not is_ours and (top not in sys.stdlib_module_names or top in AFTER_39):
                found.append(f"{path}:{line}: {module}")
        found += [f"{path}:{node.lineno}: match is Python 3.10" for node in ast.walk(tree) if isinstance(node, ast.Match)]
    assert not found, "\n".join(found)


def test_an_old_python_evaluates_no_annotation_of_the_agent() -> None:
    for path in AGENT:
        tree = parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert all(function.returns for function in functions), f"{path}: a function without annotations"
        # `X | Y` between types fails where an old Python evaluates it.
        postpones = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        assert postpones or not functions or path.name == "__main__.py", path


def test_the_way_in_is_readable_for_the_oldest_python() -> None:
    """It says that the Python is too old; a future import of annotations would be Python 3.7."""
    for name in ("__init__.py", "node/__init__.py", "node/__main__.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        ast.parse(text, feature_version=(3, 6))
        assert "from __future__" not in text, name


def test_what_is_shipped_imports_nothing_that_is_not() -> None:
    """homelab/__init__.py, node/ and worker/ go to the nodes: they must find all of `homelab` that they ask for."""
    shipped = {"homelab", *(f"homelab.{room}" for room in SHIPPED_ROOMS)}
    for name in shipped_files(str(ROOT)):
        path = ROOT / name
        for module, line in imports(path):
            if module.split(".")[0] == "homelab":
                assert ".".join(module.split(".")[:2]) in shipped or module.startswith("homelab.__"), f"{path}:{line}: {module}"


def test_every_module_of_the_shipped_rooms_is_in_the_archive() -> None:
    with tarfile.open(fileobj=io.BytesIO(ship.CODE.archive())) as archive:
        names = set(archive.getnames())
    modules = {f"homelab/{label(path)}" for room in SHIPPED_ROOMS for path in (ROOT / room).rglob("*.py")}
    assert names == modules | {"homelab/__init__.py"}
    assert any(name.count("/") > 2 for name in names), "no sub-room is shipped"


def test_nothing_of_the_controller_imports_what_trains() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if ROOT / "worker" not in path.parents and label(path) != "lab/model.py":
            found += [f"{path}:{line}: {module}" for module, line in imports(path) if within(module, {*HEAVY, "homelab.worker"})]
    assert not found, "\n".join(found)


def test_the_law_is_old_python_and_the_standard_library() -> None:
    """Planner and worker share it, and a node must be able to read it: no I/O, nothing newer than Python 3.9."""
    allowed = (set(sys.stdlib_module_names) | {"homelab.shared"}) - AFTER_39 - (DOES_IO - {"random"})
    newer = {"strict": "zip(strict=...)", "slots": "dataclass(slots=True)", "kw_only": "dataclass(kw_only=True)"}
    found = []
    for path in sorted((ROOT / "shared" / "law").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        found += [f"{path}:{line}: {module}" for module, line in imports(path) if not within(module, allowed)]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            found += [f"{path}:{call.lineno}: {newer[keyword.arg]}" for keyword in call.keywords if keyword.arg in newer]
    assert not found, "\n".join(found)


def test_only_remote_opens_connections() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if not label(path).startswith(("controller/remote/", "lab/")):
            found += [f"{path}:{line}: {module}" for module, line in imports(path) if within(module, {"paramiko", "fabric", "invoke"})]
    assert not found, "\n".join(found)


REPOSITORY = ROOT.parent
# The tests of the scripts themselves.
TESTS_OF_SCRIPTS = ("tests/benchmarks/", "tests/e2e/test_chaos.py")


def crossings(repository: Path) -> Iterator[str]:
    """Imports that scripts and tests must not have: scripts import no tests, scripts/practice (which both use) imports no other script, and tests
    import only scripts/practice, or the scripts that they test."""
    rules = (("scripts/practice", {"tests", "benchmarks", "scripts"}), ("scripts", {"tests"}), ("tests", {"scripts", "benchmarks"}))
    for folder, forbidden in rules:
        for path in sorted((repository / folder).rglob("*.py")):
            name = path.relative_to(repository).as_posix()
            if not name.startswith(TESTS_OF_SCRIPTS):
                used = [entry for entry in imports(path) if not within(entry[0], {"scripts.practice"}) and entry[0] != "scripts"]
                yield from (f"{name}:{line}: {module}" for module, line in used if within(module, forbidden))


def test_scripts_and_tests_do_not_import_each_other() -> None:
    assert not list(crossings(REPOSITORY))
    product = [path for path in ROOT.rglob("*.py") for module, _ in imports(path) if within(module, {"tests", "scripts", "benchmarks"})]
    assert not product


def test_the_rule_of_scripts_and_tests_is_awake(tmp_path: Path) -> None:
    for name, text in (
        ("scripts/a.py", "from tests.e2e import conftest\n"),
        ("tests/b.py", "def f():\n    import benchmarks.chaos\n"),
        ("tests/benchmarks/c.py", "import benchmarks.chaos\n"),
        ("tests/d.py", "import scripts.practice.desk\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert {line.partition(":")[0] for line in crossings(tmp_path)} == {"scripts/a.py", "tests/b.py"}


def loaded_by(*arguments: str) -> set[str]:
    """The modules in a Python that ran this command of ours."""
    program = (
        "import json, sys\n"
        "from homelab.cli.main import run\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "    run(sys.argv[1:])\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=110)
    return set(json.loads(done.stdout))


@pytest.mark.timeout(60)
def test_help_is_light() -> None:
    loaded = loaded_by("--help")
    assert "homelab.cli.command_list" in loaded and "typer" in loaded
    heavy = {
        *HEAVY,
        "fabric",
        "paramiko",
        "invoke",
        "pydantic",
        "tomlkit",
        "homelab.lab",
        "homelab.controller.config",
        "homelab.controller.features",
        "homelab.controller.planning",
    }
    assert not heavy & loaded


@pytest.mark.timeout(60)
def test_an_offline_plan_opens_no_connection_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[nodes]]\nname = "a"\nhost = "127.0.0.1"\n')
    (tmp_path / "recipe.toml").write_text('[script]\npath = "x.py"\n')
    loaded = loaded_by("plan", str(tmp_path / "recipe.toml"), "--offline", "--cluster", str(tmp_path / "cluster.toml"))
    assert "homelab.controller.planning.plan" in loaded
    assert not {"torch", "transformers", "paramiko", "fabric", "tomlkit"} & loaded


DEPTHS = """
class C:
    async def f(self):
        import a
if x:
    import b
elif y:
    import c
else:
    import d
try:
    import e
except E:
    import f
else:
    import g
finally:
    import h
for _ in x:
    import i
else:
    import j
match x:
    case 1:
        with x:
            import k
while x:
    import l
"""


def test_the_rule_itself_is_awake(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    from os import path\n")
    assert [module for module, _ in imports(file)] == ["typing", "typing.TYPE_CHECKING", "os", "os.path"]
    deep = tmp_path / "deep.py"
    deep.write_text(DEPTHS)
    assert [module for module, _ in imports(deep)] == list("abcdefghijkl")
    assert importlib.util.find_spec("homelab") is not None
    assert len(pure()) > 230
