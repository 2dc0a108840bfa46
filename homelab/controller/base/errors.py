"""What can go wrong for a user. The exit codes and the three parts of an error are those of `homelab.shared.protocol.errors`.

| exit code          | class              |
|--------------------|--------------------|
| `EXIT_FAILED`      | `HomelabError`     |
| `EXIT_INPUT`       | `InputError`       |
| `EXIT_UNREACHABLE` | `UnreachableError` |
| `EXIT_INTERNAL`    | any other          |
| `EXIT_INTERRUPTED` | KeyboardInterrupt  |
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from homelab.controller.base.hint import Hint
from homelab.controller.base.sanitize import plain_lines, shortened
from homelab.shared.protocol.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_UNREACHABLE,
    ThreePartError,
)

__all__ = (
    "EXIT_DONE", "EXIT_FAILED", "EXIT_INPUT", "EXIT_INTERNAL", "EXIT_INTERRUPTED", "EXIT_UNREACHABLE", "BusyError", "HomelabError", "InputError", "NoRoomError",
    "SilentError", "StoppedError", "SupersededError", "TakenError", "ThreePartError", "ToldExit", "UnreachableError", "did_you_mean",
)  # fmt: skip


class ToldExit(int):
    """An exit code whose reason was told already, in better words than its own."""


class HomelabError(ThreePartError):
    """A check or a run failed.

    The words may come from a node, a file or the command line, and go to a terminal, a log or an event: whatever a terminal would obey
    is removed here.
    """

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(
            shortened(plain_lines(message)), where=shortened(plain_lines(where)), hint=Hint.of_parts([hint]).cleaned(plain_lines)
        )


class InputError(HomelabError):
    """What the user wrote (a file, an option, a name) is not valid."""

    exit_code = EXIT_INPUT


class MissingError(InputError):
    """A file that the user named does not exist (yet)."""


class UnreachableError(HomelabError):
    """A node does not answer, or refuses the login."""

    exit_code = EXIT_UNREACHABLE


class SilentError(UnreachableError):
    """A node's address does not answer: it is off or away, or this machine has no network itself."""


class BusyError(HomelabError):
    """The node does the same for another command just now: the question can be asked again."""


class NoRoomError(HomelabError):
    """The model does not fit into the memory that is free on the node."""


class TakenError(HomelabError):
    """Another command starts or recovers this run, or another run on the same node, just now. The refused command has stopped nothing."""


class StoppedError(HomelabError):
    """A user stopped the run while it was being started."""


class SupersededError(HomelabError):
    """Another controller has started a newer attempt of the run."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """' Did you mean "x"?' for the nearest known word, or an empty string when none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


# A server greets at once. After so long the login is given up (`homelab.controller.remote.ssh_login`); before, a warning says that it is late.
GREETING_LIMIT_S = 10.0
