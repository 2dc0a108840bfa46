"""The folder in which `homelab run` was typed, copied to a temporary one with a recipe and the program that torchrun starts: nothing is written into the folder itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from homelab.controller.attempt.script_imports import MOST_BYTES, MOST_FILES
from homelab.controller.base import links
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Command, Hint
from homelab.controller.base.units import megabytes
from homelab.controller.config.program_command import WRAPPER, Program
from homelab.shared.protocol.file_kind import half_character

# Of what git does not know: folders that Python and npm make, and at the top those that trainings make, unless a program's modules are in them.
_NEVER, _MADE = ("__pycache__", "node_modules"), ("runs", "models", "wandb", "outputs")
_GIT_S = 30.0  # somebody may stand in a home folder of millions of files
_SHOWN = 5


@contextlib.contextmanager
def recipe_of(program: Program, folder: Path) -> Iterator[Path]:
    """The recipe's file, which exists inside the block. Raises InputError where the program is not there, or the folder is too large to be sent."""
    import tomlkit

    if not program.is_module and not (folder / program.target).is_file():
        raise InputError("this program does not exist", where=str(folder / program.target), hint=f"ls {shlex.quote(str(folder))}")
    names = files(folder)
    _refuse_not_utf8(names, program, folder)
    for name in names:
        links.refuse_leaving(folder / name, folder, f"{folder / name}, which would be sent to the nodes")
    _refuse_too_much(names, folder)
    with tempfile.TemporaryDirectory(prefix="homelab-run-") as temporary:
        place = Path(temporary)
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, place / name)
        (place / WRAPPER).write_text(program.wrapper, encoding="utf-8")
        recipe = place / f"{program.label}.toml"
        script = {"path": WRAPPER, "files": names, "args": list(program.args)}
        recipe.write_text(tomlkit.dumps({"script": script}), encoding="utf-8")
        yield recipe


def files(folder: Path) -> list[str]:
    """What is sent, relative to the folder: what git knows, and all else but what .gitignore names, what is hidden and what programs make."""
    known = _listed(folder, "--cached")
    with tempfile.TemporaryDirectory(prefix="homelab-git-") as place:
        if known is None and shutil.which("git"):  # no repository: git reads its .gitignore all the same
            subprocess.run(["git", "init", "-q", "--bare", place], capture_output=True, check=False, stdin=subprocess.DEVNULL)
        of_its_own = () if known is not None else (f"--git-dir={place}", f"--work-tree={folder}")
        others = _listed(folder, "--others", "--exclude-standard", own=of_its_own)
    names = [*(known or ()), *_not_made(folder, _walked(folder) if others is None else others)]
    for name in [name for name in names if (folder / name).is_dir() and not (folder / name).is_symlink()]:  # another repository in this one
        names += [os.path.join(name, inner) for inner in files(folder / name)]
    # The recipe's files are sent by their folders, so that hidden ones stay here.
    shown = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
    for name in shown:
        if os.path.islink(folder / name) and not os.path.isfile(folder / name):
            links.refuse_leaving(folder / name, folder, f"{folder / name}, which would be sent to the nodes")
    return sorted(name for name in shown if (folder / name).is_file())


def _listed(folder: Path, *what: str, own: Sequence[str] = ()) -> list[str] | None:
    """The names that `git ls-files` gives; None where there is no git, no repository, or too much."""
    command = ["git", *own, "-C", str(folder), "ls-files", "-z", *what]
    try:
        listed = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=_GIT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name] if listed.returncode == 0 else None


def _walked(folder: Path) -> list[str]:
    names: list[str] = []
    for root, folders, found in os.walk(folder):
        links_of_it = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [os.path.relpath(os.path.join(root, name), folder) for name in (*links_of_it, *sorted(found)) if not name.startswith(".")]
        if len(_not_made(folder, names)) > 20 * MOST_FILES:
            break
    return names


def _not_made(folder: Path, names: Sequence[str]) -> list[str]:
    made = {name for name in _MADE if not any((folder / name).glob("*.py"))}
    environments: dict[Path, bool] = {}

    def is_made(name: str) -> bool:
        path = Path(name)
        for place in path.parents:
            if place not in environments:
                environments[place] = place.name in _NEVER or (folder / place / "pyvenv.cfg").is_file()
        return (len(path.parts) > 1 and path.parts[0] in made) or any(environments[place] for place in path.parents)

    return [name for name in names if not is_made(name)]


def _refuse_not_utf8(names: Sequence[str], program: Program, folder: Path) -> None:
    """The recipe names these files and holds these words, and a recipe is UTF-8."""
    word = next(filter(half_character, (program.target, *program.args)), None)
    name = next(filter(half_character, names), None)
    if name is None and word is None:
        return
    shown = os.fsencode(name or word or "").decode("utf-8", "replace")
    if name is None:
        hint = "rename the file that it means, and type the new name"
        raise InputError("this word is not UTF-8, and a recipe cannot hold it", where=f"homelab run, {shown}", hint=hint)
    parts = Path(name).parts
    place = next(number for number, part in enumerate(parts) if half_character(part))
    better = "".join(os.fsencode(one).decode("cp1252", "replace") if half_character(one) else one for one in parts[place])
    beside = folder.joinpath(*parts[:place])
    better = better.replace("\ufffd", "_")
    while os.path.lexists(beside / better):
        better = f"_{better}"
    code = f"import os; os.rename({os.fsencode(beside / parts[place])!r}, {os.fsencode(beside / better)!r})"
    raise InputError(
        "the name of this file is not UTF-8, and a recipe cannot hold it", where=f"{folder}/{shown}",
        hint=Hint("{}; or move it out of this folder: then it is not sent", Command(f"python3 -c {shlex.quote(code)}")),
    )  # fmt: skip


def _refuse_too_much(names: Sequence[str], folder: Path) -> None:
    sizes = {name: (folder / name).stat().st_size for name in names}
    if len(sizes) < MOST_FILES and sum(sizes.values()) <= MOST_BYTES:
        return
    largest = ", ".join(f"{name} ({megabytes(sizes[name], '.0f')} MB)" for name in sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN])
    raise InputError(
        f"this folder has {len(sizes)} files of {megabytes(sum(sizes.values()), '.0f')} MB (at most {MOST_FILES - 1}, and {megabytes(MOST_BYTES, '.0f')} MB are sent)",
        where=f"{folder}; the largest: {largest}",
        hint="list the files that stay here in .gitignore, or change to the folder of the program; copy data to the nodes once, and use its path there",
    )
