"""Hints as values: a sentence whose shell commands are known as commands. Pure.

A hint and a command are their own text, so everything that shows or stores text takes them as they are. An f-string makes plain text
of them; `Hint("{}; or edit cluster.toml", command)` and `chain` keep what is known.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Self

Options = Callable[[str], str]
"""Name of a command of ours -> the options to add to it, as shell text (" --cluster FILE"), or an empty string."""

# The first one that a text begins with is its name: two words before one.
_OWN_NAMES = (
    "bench card", "bench", "chat", "compare", "data", "demo", "doctor", "export", "fetch", "gguf", "init", "launch", "logs", "merge", "new", "plan", "preflight", "profile", "push",
    "queue add", "queue install", "queue move", "queue pause", "queue remove", "queue resume", "queue run", "queue",
    "recover", "report", "run", "runs", "schema", "setup", "status", "stop", "supervise", "teardown", "tensorboard", "track", "trust", "verify", "wake", "web", "why",
    "yield",
)  # fmt: skip
# Not "the user that homelab logs in with".
_OWN = re.compile(rf"(?<![\w./-])homelab ({'|'.join(_OWN_NAMES)})\b(?!-)(?! in with)")


class Command(str):
    """Shell text. `on_node` is where it runs (empty: on the controller); `needs_root`: sudo asks for a password, and needs a terminal.

    `own_name` is the name of a command of ours ("preflight"), empty for other programs. `steps` are the commands of a chain.
    """

    on_node: str
    needs_root: bool
    own_name: str
    steps: tuple[Command, ...]

    def __new__(cls, text: str, *, on_node: str = "", needs_root: bool = False, own_name: str = "", steps: Iterable[Command] = ()) -> Self:
        command = super().__new__(cls, text)
        command.on_node, command.needs_root, command.own_name, command.steps = on_node, needs_root, own_name, tuple(steps)
        return command

    @classmethod
    def said(cls, text: str) -> Command:
        """A command from a file that we wrote."""
        match = _OWN.match(text)
        return text if isinstance(text, Command) else Command(text, own_name=match[1] if match else "")

    def with_options(self, options: Options) -> Command:
        """The same command with the options behind its name; unchanged where it has them already, or is not ours."""
        if self.steps:
            return chain(*(step.with_options(options) for step in self.steps))
        added = options(self.own_name) if self.own_name else ""
        head = f"homelab {self.own_name}"
        return self if _has(self, added) else Command(f"{head}{added}{self.removeprefix(head)}", own_name=self.own_name)

    def for_recipe(self, recipe: str) -> Command:
        """The same command, with this file in place of the word RECIPE if it is ours."""
        if self.steps:
            return chain(*(step.for_recipe(recipe) for step in self.steps))
        return Command(re.sub(r"\bRECIPE\b", lambda _: shlex.quote(recipe), self), own_name=self.own_name) if self.own_name else self

    def cleaned(self, clean: Callable[[str], str]) -> Command:
        """The same command with its text cleaned."""
        if self.steps:
            return chain(*(step.cleaned(clean) for step in self.steps))
        return Command(clean(self), on_node=self.on_node, needs_root=self.needs_root, own_name=self.own_name)


NO_COMMAND = Command("")


def homelab(text: str, *words: str) -> Command:
    """A command of ours: shell text that begins with its name, and words that are quoted: `homelab("logs --rank 0", run)`."""
    named = _OWN.match(f"homelab {text}")
    return Command(
        " ".join(["homelab", text, *(shlex.quote(word) for word in words)]), own_name=named[1] if named else text.partition(" ")[0]
    )


def chain(*commands: Command) -> Command:
    """The commands one after the other, each only where the one before has succeeded."""
    nodes = {command.on_node for command in commands}
    return Command(
        " && ".join(commands),
        on_node=nodes.pop() if len(nodes) == 1 else "",
        needs_root=any(command.needs_root for command in commands),
        steps=commands,
    )


class Hint(str):
    """A sentence that tells how to fix something. Each `{}` of the template stands for the next of `values`; other braces are text."""

    parts: tuple[str, ...]

    def __new__(cls, template: str, *values: object) -> Self:
        first, *texts = template.split("{}", len(values)) if values else [template]
        assert len(texts) == len(values), template
        return cls.of_parts(
            [
                first,
                *(
                    part
                    for value, text in zip(values, texts, strict=True)
                    for part in (value if isinstance(value, str) else str(value), text)
                ),
            ]
        )

    @classmethod
    def of_parts(cls, parts: Iterable[str]) -> Self:
        """Plain texts, commands and other hints, one after the other."""
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Hint) else (part,)) if inner]
        hint = super().__new__(cls, "".join(flat))
        hint.parts = tuple(flat)
        return hint

    @classmethod
    def said(cls, text: str) -> Self:
        """A sentence from another program of ours (a node, a worker, an older run's folder), whose commands are known by their names only.

        A hint and a command stay what they are.
        """
        if isinstance(text, (Hint, Command)):
            return cls.of_parts([text])
        pieces = _OWN.split(text)  # text, name, text, name, ...: where a command's words end, and prose goes on, is not known
        return cls.of_parts(homelab(piece) if number % 2 else piece for number, piece in enumerate(pieces))

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands in it, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Command))

    def after(self, command: Command) -> str | None:
        """What is said behind the command where the hint begins with it, else None."""
        return "".join(self.parts[1:]) if self.parts and self.parts[0] == command else None

    def with_options(self, options: Options) -> Hint:
        """The same sentence, in which the commands of ours have their options."""
        return Hint.of_parts(
            part if self._has_behind(number, options) else with_options(part, options) for number, part in enumerate(self.parts)
        )

    def _has_behind(self, number: int, options: Options) -> bool:
        """Whether part `number` is a command that is known by its name only, and what follows it, up to the next command, has its options."""
        part = self.parts[number]
        if not isinstance(part, Command) or not part.own_name or part != homelab(part.own_name):
            return False
        words = takewhile(lambda text: not isinstance(text, Command), self.parts[number + 1 :])
        return _has("".join(words), options(part.own_name))

    def cleaned(self, clean: Callable[[str], str]) -> Hint:
        """The same sentence with each plain text and command cleaned; the spaces around them stay."""
        return self if clean(self) == self else Hint.of_parts(_cleaned(part, clean) for part in self.parts)


def with_options(text: str, options: Options) -> str:
    """The hint or command with the options of its commands; plain text as it is."""
    return text.with_options(options) if isinstance(text, (Hint, Command)) else text


def for_recipe(text: str, recipe: str) -> str:
    """The hint or command, whose commands of ours name this file in place of the word RECIPE; plain text as it is."""
    if isinstance(text, Hint):
        return Hint.of_parts(for_recipe(part, recipe) for part in text.parts)
    return text.for_recipe(recipe) if isinstance(text, Command) else text


def cleaned(text: str, clean: Callable[[str], str]) -> str:
    """The text cleaned; a hint or command stays one."""
    return text.cleaned(clean) if isinstance(text, (Hint, Command)) else clean(text)


def _has(text: str, options: str) -> bool:
    """Whether the options are in the text already: as whole words, not as the beginning of longer ones."""
    return re.search(rf"{re.escape(options.strip())}(?![\w/-]|\.\w)", text) is not None if options else True


def _cleaned(part: str, clean: Callable[[str], str]) -> str:
    if isinstance(part, Command):
        return part.cleaned(clean)
    body = part.strip(" ")
    return part.replace(body, clean(body), 1) if body else part
