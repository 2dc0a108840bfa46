"""Which test files run: `--select fast` (no torch, no lab), or `--select changed` (those above what `git diff` names).

Imports decide, those of the product as tests/limits.py reads them. A file that is left out is not even read by pytest.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests import limits

ROOT = Path(__file__).resolve().parents[1]
TORCH = {"torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "safetensors"}
# Who imports one of these starts machines or commands; a command may import anything.
LAB = ("homelab/lab/", "scripts/practice/desk.py", "scripts/practice/prepared_commands.py", "tests/servers.py", "tests/ordinary_user.py")
COMMANDS = {"homelab/__main__.py", "homelab/node/__main__.py", "homelab/worker/training/train.py"}
FINDS = {
    "homelab/cli/command_list.py": "homelab/cli/", "homelab/controller/checks/registry.py": "homelab/controller/checks/", "homelab/node/verbs.py": "homelab/node/",
}  # fmt: skip
# What is read and not imported: the guide, its reference, and the schemas that are made from the recipe's types.
PAGES = (
    "tests/test_docs.py",
    "tests/test_english.py",
    "tests/test_evidence.py",
    "tests/controller/config/test_reference.py",
    "tests/cli/test_explain.py",
)
# They read the whole tree.
RULES = ("tests/test_limits.py", "tests/test_imports.py", "tests/test_readme.py")


@functools.cache
def arrows() -> dict[str, set[str]]:
    """{file: the files and outside packages that it imports or names}, paths from the root of the repository."""
    graph: dict[str, set[str]] = {}
    for source, target in limits.file_arrows():
        graph.setdefault(f"homelab/{source}", set()).add(f"homelab/{target}")
    files = {
        str(path.relative_to(ROOT)): path for folder in ("homelab", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
    }
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    modules |= {name.removeprefix("scripts."): file for name, file in modules.items() if name.startswith("scripts.benchmarks")}
    for name, path in files.items():
        found = graph.setdefault(name, set())
        if name in FINDS:  # it imports by name what it is asked for
            found |= {other for other in files if other.startswith(FINDS[name])}
        if name == "tests/small_model.py":  # it makes the model for those that need it, and brings nothing to the others
            continue
        for word in words(limits.trees().get(path) or ast.parse(path.read_text(encoding="utf-8"))):
            known = next((known for known in (word, word.rpartition(".")[0]) if known in modules), None)
            found.add(modules[known] if known else word.partition(".")[0])
        if name.startswith("tests/"):
            found |= {str(parent / "conftest.py") for parent in Path(name).parents if str(parent / "conftest.py") in files} - {name}
        if any(target.startswith(LAB) for target in found):
            found |= COMMANDS if not name.startswith("homelab/") else set()
    return graph


def words(tree: ast.Module) -> set[str]:
    """Modules that a file imports, skips without, or names in a text (`python -m`)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            found.add(ast.literal_eval(node.args[0]))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]
            if re.fullmatch(r"(homelab|tests|scripts)(\.\w+)+", text):
                found.add(text)
    return found


def reached(start: str, through: tuple[str, ...] = ("homelab/", "tests/", "scripts/")) -> set[str]:
    """All that a file imports, directly or by what it imports; not further than `through`."""
    seen, waiting = {start}, [start]
    while waiting:
        name = waiting.pop()
        if name.startswith(through):
            new = arrows().get(name, set()) - seen
            seen |= new
            waiting += new
    return seen


def tests() -> list[str]:
    return [name for name in arrows() if name.startswith("tests/") and Path(name).name.startswith("test_")]


def fast() -> set[str]:
    """Test files that need neither torch nor a lab."""

    def is_fast(name: str) -> bool:
        near = reached(name, ("tests/", "scripts/"))
        return not any(target.startswith(LAB) for target in near) and not reached(name) & TORCH

    return {name for name in tests() if is_fast(name)}


def above(changed: Iterable[str]) -> set[str]:
    """Test files that are among the changed files, or reach one of them. A file that is no Python stands for its folder, and for who names it."""
    sources: set[str] = set()
    for name in changed:
        if name.endswith(".py"):
            sources.add(name)
        else:
            folders = [str(parent) for parent in Path(name).parents if len(parent.parts) > 1]
            beside = [{other for other in arrows() if str(Path(other).parent) == folder} for folder in folders]
            sources |= next((files for files in beside if files), set())
            sources |= set(PAGES) if name.endswith(".md") or name.startswith(("homelab/docs/", "recipes/schemas/")) else set()
            sources |= {other for other in tests() if Path(name).name in (ROOT / other).read_text(encoding="utf-8")}
    found = {name for name in tests() if name in sources or reached(name) & sources}
    return found | (set(RULES) if sources else set())


def changed_files(since: str) -> list[str]:
    """What differs from a commit in this working tree, with files that git does not know yet."""
    git = ["git", "-C", str(ROOT)]
    named = subprocess.run([*git, "diff", "--name-only", since, "--"], capture_output=True, text=True, check=True).stdout
    new = subprocess.run([*git, "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True, check=True).stdout
    return [*named.splitlines(), *new.splitlines()]


def selected(what: str) -> set[str]:
    """The files of `--select`: "fast", "changed" (since the last commit) or "changed:COMMIT"."""
    kind, _, since = what.partition(":")
    return fast() if kind == "fast" else above(changed_files(since or "HEAD"))
