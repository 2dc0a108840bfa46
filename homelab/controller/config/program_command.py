"""A command line that trains (`homelab run -- ...`), as the Python program that torchrun is to start. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config import typed_secrets

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Command -> the module that it starts on every process, where it is one. Read in trl 1.16 (trl/cli), axolotl 0.13 (cli/main.py) and llamafactory 0.9 (cli.py).
_MODULES = {"axolotl train": "axolotl.cli.train", "llamafactory-cli train": "llamafactory.launcher"}
_OF_TRL = ("sft", "dpo", "grpo", "kto", "reward", "rloo")
WRAPPER = "homelab_program.py"
# In an argument, typed in quotes: only the node knows its folder, and what the program has saved there before.
_SAVED, _LAST = "$HOMELAB_CHECKPOINT_DIR", "$HOMELAB_LAST_CHECKPOINT"


@dataclass(frozen=True)
class TypedCommand:
    """What a person typed behind `homelab run --`, and where: fixes name this folder's files and this command."""

    words: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Program:
    """A file below the folder, or a module (`is_module`), and its arguments."""

    target: str
    args: tuple[str, ...]
    is_module: bool = False

    @property
    def label(self) -> str:
        """A word for the run's name: train, trl-sft, ..."""
        stem = self.target.rpartition("/")[2].removesuffix(".py").replace(".", "-").replace("_", "-")
        return re.sub(r"[^A-Za-z0-9-]+", "", stem.replace("-scripts", "").replace("-cli", ""))[:40].strip("-") or "program"

    @property
    def wrapper(self) -> str:
        """The file that torchrun starts: it goes into the folder of the program, so that relative paths mean the same as where the command was typed."""
        if self.is_module:
            run = f"runpy.run_module({self.target!r}, run_name='__main__', alter_sys=True)"
        else:
            run = f"runpy.run_path(os.path.join(folder, {self.target!r}), run_name='__main__')"
        return (
            "import os, runpy, sys\n\nif __name__ == '__main__':\n    folder = os.path.dirname(os.path.abspath(__file__))\n    os.chdir(folder)\n"
            f"    sys.path[0] = folder{'' if self.is_module or '/' not in self.target else ' + ' + repr('/' + self.target.rpartition('/')[0])}\n"
            f"    sys.argv[0] = {self.target!r}\n"
            f"    saved, last, words = os.environ.get({_SAVED[1:]!r}, {_SAVED!r}), os.environ.get({_LAST[1:]!r}, ''), []\n"
            "    for word in sys.argv[1:]:\n"
            f"        if last or {_LAST!r} not in word:\n"
            f"            words.append(word.replace({_SAVED!r}, saved).replace({_LAST!r}, last))\n"
            # There is none at the first start: an option that names it is left out.
            f"        elif word == {_LAST!r} and words and words[-1].startswith('-') and '=' not in words[-1]:\n            words.pop()\n"
            f"    sys.argv[1:] = words\n    {run}\n"
        )


def parsed(words: Sequence[str]) -> Program:
    """Of `python train.py ...`, `python -m package ...`, `accelerate launch train.py ...`, `torchrun train.py ...`, `trl sft ...`, `axolotl train ...`,
    `llamafactory-cli train ...`, or `train.py ...`. Raises InputError for anything else.
    """
    where, first, rest = "the command behind --", words[0] if words else "", tuple(words[1:])
    name = first.rpartition("/")[2]
    if what := typed_secrets.found(words):
        raise InputError(
            f"the command contains a secret ({what}): homelab would store it with the run, and every user of a node could see it", where=where,
            hint=f"remove it and use the environment: export HF_TOKEN=...; for another secret on the node itself: {typed_secrets.HELP}",
        )  # fmt: skip
    if not words:
        raise InputError("there is no command", where=where, hint=homelab("run -- python train.py"))
    if _PYTHON.fullmatch(name) or name == "torchrun" or (name == "accelerate" and rest[:1] == ("launch",)):
        return _started(name, rest[1:] if name == "accelerate" else rest, where)
    if name == "trl" and rest and rest[0] in _OF_TRL:
        return Program(f"trl.scripts.{rest[0]}", rest[1:], is_module=True)
    if " ".join([name, *rest[:1]]) in _MODULES:
        # llamafactory's launcher reads its configuration as the first argument, axolotl's too.
        return Program(_MODULES[f"{name} {rest[0]}"], rest[1:], is_module=True)
    if first.endswith(".py"):
        return Program(_relative(first, where), rest)
    raise InputError(
        f"homelab cannot start {first!r} on several machines: homelab does not know it as a Python program", where=where,
        hint=Hint("one of: python train.py, python -m package, accelerate launch train.py, trl sft, axolotl train, llamafactory-cli train"),
    )  # fmt: skip


def _started(name: str, words: tuple[str, ...], where: str) -> Program:
    """What the starter is asked to start. Its own options are refused: nodes, processes and ports are homelab's, the rest would be left out silently."""
    if words[:1] == ("-m",) and len(words) > 1:
        return Program(words[1], words[2:], is_module=True)
    if words and not words[0].startswith("-"):
        return Program(_relative(words[0], where), words[1:])
    option = words[0] if words else "nothing"
    hint = "leave out the options for nodes, processes and ports; other settings of accelerate are variables: ACCELERATE_MIXED_PRECISION=bf16 in [environment] of a [script] recipe"
    raise InputError(
        f"{name} is given {option}, but homelab starts the processes itself",
        where=where,
        hint=hint if name != "python" else "python train.py, or python -m package",
    )


def _relative(path: str, where: str) -> str:
    clean = re.sub(r"^(\./)+", "", path)
    if clean.startswith(("/", "~", "../")) or "/../" in clean:
        hint = Hint("change to the folder of the program, then: {}", homelab("run -- python train.py"))
        raise InputError(f"{path} is not below this folder, and homelab sends only this folder to the nodes", where=where, hint=hint)
    return clean
