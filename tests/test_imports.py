"""Who may import whom: the pure core does no I/O, nodes get the standard library only, and `--help` stays light."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import homelab

ROOT = Path(homelab.__file__).parent
PURE = [
    *sorted((ROOT / "planning").glob("*.py")), ROOT / "hardware.py", ROOT / "torch_builds.py", ROOT / "facts.py", ROOT / "errors.py",
    *sorted(path for path in (ROOT / "config").glob("*.py") if path.name != "load.py"),
    *sorted((ROOT / "diagnose").glob("*.py")), *sorted((ROOT / "checks").glob("*.py")),
    ROOT / "dashboard" / "view.py", ROOT / "dashboard" / "snapshot.py", ROOT / "dashboard" / "eta.py",
    ROOT / "dashboard" / "chart.py", ROOT / "dashboard" / "pace.py", ROOT / "secrecy.py", ROOT / "plain.py",
    *(ROOT / "runs" / f"{name}.py" for name in ("state", "reply", "watchdog", "policy", "pace", "movement", "signs", "identity")),
]  # fmt: skip
DOES_IO = {
    "subprocess", "socket", "paramiko", "fabric", "invoke", "os", "shutil", "tempfile", "glob", "asyncio", "threading", "selectors",
    "urllib.request", "http", "ssl", "signal", "multiprocessing", "random",
}  # fmt: skip
HEAVY = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "safetensors", "numpy")
# What the plan predicts with is what the worker does: these files import nothing that is not everywhere.
SHARED_WITH_THE_WORKER = {f"homelab.worker.{name}" for name in ("speed", "sampler", "joined", "compress", "learning_rate", "interval", "replicas")}
# Python's own list has none of what was added after 3.9.
AFTER_39 = {"tomllib", "graphlib.nothing"}


def imports(path: Path, *, only_at_top: bool = False) -> Iterator[tuple[str, int]]:
    """(module, line) of all imports of a file; not those for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree.body if only_at_top else list(ast.walk(tree))
    for node in nodes:
        if id(node) in hidden:
            continue
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


@pytest.mark.parametrize("path", PURE, ids=label)
def test_the_pure_core_does_no_io(path: Path) -> None:
    found = [f"{path}:{line}: {module}" for module, line in imports(path) if within(module, DOES_IO)]
    found += [f"{path}:{line}: {module}" for module, line in imports(path) if within(module, {"homelab.remote", "homelab.control", "homelab.cli", "homelab.node", "homelab.lab"})]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # "Now" is an argument of the pure core, never asked for.
            if called in ("open", "print", "input", "time.time", "time.monotonic", "time.sleep", "datetime.now", "datetime.datetime.now"):
                found.append(f"{path}:{node.lineno}: {called}()")
            if called.rpartition(".")[2] in ("read_text", "write_text", "read_bytes", "write_bytes", "unlink", "mkdir", "exists", "is_file", "is_dir"):
                found.append(f"{path}:{node.lineno}: {called}()")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted((ROOT / "node").rglob("*.py")), ids=label)
def test_the_agent_is_old_python_and_the_standard_library(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    found = []
    for module, line in imports(path):
        top = module.split(".")[0]
        if top == "homelab":
            ours = module.split(".")[1:2]
            allowed = ours in ([], ["node"]) or module == "homelab"
        else:
            allowed = top in sys.stdlib_module_names and top not in AFTER_39
        if not allowed:
            found.append(f"{path}:{line}: {module}")
    assert not found, "\n".join(found)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Match), f"{path}:{node.lineno}: match is Python 3.10"
        # `X | Y` between types fails when an old Python evaluates it; the agent has no annotations at all.
        assert not (isinstance(node, ast.FunctionDef) and node.returns), f"{path}:{node.lineno}: an annotation"


def test_what_is_shipped_imports_nothing_that_is_not() -> None:
    """homelab/__init__.py, node/ and worker/ go to the nodes: they must find all of `homelab` that they ask for."""
    shipped = {"homelab", "homelab.node", "homelab.worker"}
    for path in [ROOT / "__init__.py", *(ROOT / "node").rglob("*.py"), *(ROOT / "worker").glob("*.py")]:
        for module, line in imports(path):
            if module.split(".")[0] == "homelab":
                assert ".".join(module.split(".")[:2]) in shipped or module.startswith("homelab.__"), f"{path}:{line}: {module}"


def test_nothing_of_the_controller_imports_what_trains() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name != "worker" and label(path) != "lab/model.py":
            used = [entry for entry in imports(path) if not within(entry[0], SHARED_WITH_THE_WORKER)]
            found += [f"{path}:{line}: {module}" for module, line in used if within(module, {*HEAVY, "homelab.worker"}) and module != "homelab.worker"]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", sorted(SHARED_WITH_THE_WORKER))
def test_what_the_plan_shares_with_the_worker_is_light(module: str) -> None:
    path = ROOT.parent / f"{module.replace('.', '/')}.py"
    ours = SHARED_WITH_THE_WORKER | sys.stdlib_module_names
    found = [f"{path}:{line}: {name}" for name, line in imports(path, only_at_top=True) if not within(name, ours)]
    assert not found, "\n".join(found)


def test_only_remote_opens_connections() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name not in ("remote", "lab"):
            found += [f"{path}:{line}: {module}" for module, line in imports(path) if within(module, {"paramiko", "fabric", "invoke"})]
    assert not found, "\n".join(found)


def test_the_house_stands_in_its_order() -> None:
    """errors < config < planning < checks < remote < control < cli: nobody imports from above."""
    order = ["planning", "checks", "remote", "control", "cli"]
    for index, package in enumerate(order):
        for path in (ROOT / package).glob("*.py"):
            above = {f"homelab.{name}" for name in order[index + 1 :]}
            for module, line in imports(path):
                assert not within(module, above), f"{path}:{line}: {module}"


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
    assert "homelab.cli.commands" in loaded and "typer" in loaded
    heavy = {*HEAVY, "fabric", "paramiko", "invoke", "pydantic", "humanize", "homelab.lab", "homelab.config", "homelab.control", "homelab.planning"}
    assert not heavy & loaded


@pytest.mark.timeout(60)
def test_an_offline_plan_opens_no_connection_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[nodes]]\nname = "a"\nhost = "127.0.0.1"\n')
    (tmp_path / "recipe.toml").write_text('[script]\npath = "x.py"\n')
    loaded = loaded_by("plan", str(tmp_path / "recipe.toml"), "--offline", "--cluster", str(tmp_path / "cluster.toml"))
    assert "homelab.planning.plan" in loaded
    assert not {"torch", "transformers", "paramiko", "fabric"} & loaded


def test_the_rule_itself_is_awake(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    from os import path\n")
    assert [module for module, _ in imports(file)] == ["typing", "typing.TYPE_CHECKING", "os", "os.path"]
    assert importlib.util.find_spec("homelab") is not None
    assert len(PURE) > 40
