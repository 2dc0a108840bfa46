"""What a [script] imports from beside it, and what its recipe names: found without running it, so that all of it can be shipped.

Python puts the script's folder first on sys.path (docs.python.org, sys.path): a module there wins over an installed one, here and
on the nodes. An import is seen where it is written down: `import x`, `from x import y`, and `import_module("x")` of a literal name.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from homelab.controller.base import links
from homelab.controller.base.errors import InputError
from homelab.controller.base.units import megabytes

MOST_FILES, MOST_BYTES = 500, 64 << 20
_NOT_SHIPPED = ("__pycache__",)


def beside(script: Path, named: Sequence[str], recipe_path: Path) -> dict[str, Path]:
    """Path below the script's folder -> file, of all but the script itself. `named` are `[script] files`, relative to the recipe.

    Raises InputError for what is named and cannot be shipped, for an imported module that is compiled, and for too much of it.
    """
    root = script.parent
    files: dict[str, Path] = {}
    for name in named:
        for file in _named(name, root, recipe_path):
            links.refuse_leaving(file, root, f"{recipe_path}, key script.files: {file}")
            files[file.relative_to(root).as_posix()] = file
    waiting = [script, *(file for file in files.values() if file.suffix == ".py")]
    while waiting:
        file = waiting.pop()
        for module in _imports(file, root):
            for other in _module(module, root, file):
                inside = other.relative_to(root).as_posix()
                if other != script and inside not in files:
                    links.refuse_leaving(other, root, f"{recipe_path}, [script]: {other}, which {file.name} imports")
                    files[inside] = other
                    waiting.append(other)
    files.pop(script.name, None)
    _refuse_too_much(files, script, recipe_path)
    return dict(sorted(files.items()))


def modules_near(script: Path) -> dict[str, str]:
    """Module -> its file, of all that lie beside a script or one folder above it: what an import that failed may have meant."""
    path_of: dict[str, str] = {}
    for folder in (script.parent, script.parent.parent):
        try:
            entries = sorted(folder.iterdir())
        except OSError:  # gone, or not the machine of the launch
            continue
        for entry in entries:
            if entry.suffix in (".py", ".so") and entry != script:
                path_of.setdefault(entry.name.split(".")[0], str(entry))
            elif (entry / "__init__.py").exists():
                path_of.setdefault(entry.name, str(entry))
    return path_of


def _named(name: str, root: Path, recipe_path: Path) -> Iterator[Path]:
    place = recipe_path.resolve().parent / Path(name).expanduser()
    where = f"{recipe_path}, key script.files: {place}"
    if not place.exists():
        raise InputError("this file does not exist", where=where, hint="paths are relative to the recipe")
    place = place.resolve()
    if not place.is_relative_to(root):
        raise InputError(
            "this file is not in the folder of the script or below it, so homelab cannot send it with the script", where=where,
            hint=f"put it below {shlex.quote(str(root))}; if it is on every node already, give its path in [script] args",
        )  # fmt: skip
    if place.is_file():
        yield place
    for file in sorted(place.rglob("*")) if place.is_dir() else ():
        parts = file.relative_to(place).parts
        if file.is_file() and not any(part in _NOT_SHIPPED or part.startswith(".") for part in parts):
            yield file


def _imports(file: Path, root: Path) -> Iterator[str]:
    """Dotted names of all modules that a file may import. Nothing of one that is no Python: running it says so, with the line."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    except OSError as error:
        raise InputError(
            f"a file that the script imports cannot be read: {error.strerror}", where=str(file), hint=f"ls -l {shlex.quote(str(file))}"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = file.parents[node.level - 1] if node.level <= len(file.parents) else root.parent
                if not above.is_relative_to(root):
                    continue  # Python refuses it, too
                base = ".".join((*above.relative_to(root).parts, *([base] if base else [])))
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            yield from (
                value.value.lstrip(".") for value in node.args[:1] if isinstance(value, ast.Constant) and isinstance(value.value, str)
            )


def _module(dotted: str, root: Path, asked_by: Path) -> Iterator[Path]:
    """The files of a module that lies below `root`: a whole package, because it may import its own parts dynamically."""
    place = root
    for part in dotted.split("."):
        place = place / part
        if (place / "__init__.py").is_file():
            yield from (file for file in sorted(place.rglob("*.py")) if file.is_file())
            return
        if (file := place.with_name(f"{part}.py")).is_file():
            yield file
            return
        compiled = sorted(place.parent.glob(f"{part}.*.so")) if part.isidentifier() and place.parent.is_dir() else []
        if compiled:
            raise InputError(
                f"the script imports {dotted}, which is compiled for this machine and may not run on the nodes", where=f"{asked_by}: {compiled[0]}",
                hint="install it into the environment of every node and put this file elsewhere, or ship it with its Python source",
            )  # fmt: skip
        if not place.is_dir():
            return


def _refuse_too_much(file_of: dict[str, Path], script: Path, recipe_path: Path) -> None:
    sizes = {inside: file.stat().st_size for inside, file in file_of.items()}
    if len(sizes) <= MOST_FILES and sum(sizes.values()) <= MOST_BYTES:
        return
    largest = max(sizes, key=lambda inside: sizes[inside])
    raise InputError(
        f"{len(sizes)} files of {megabytes(sum(sizes.values()), '.0f')} MB would be sent with the script (at most {MOST_FILES}, and {megabytes(MOST_BYTES, '.0f')} MB)",
        where=f"{recipe_path}, [script]: {script.parent}, the largest: {largest}",
        hint="install packages into the environment of every node, and put data there once: a path that starts with / in [script] args",
    )
