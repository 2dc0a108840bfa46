"""What can go wrong for a user, and the exit code of each kind.

Every error has three parts: what was seen (`message`), where (`where`: node, file, line or key) and the command or edit
that mends it (`hint`). The command line prints them; nothing else formats errors.

| exit code | meaning                              | class              |
|-----------|--------------------------------------|--------------------|
| 0         | done                                 |                    |
| 1         | a check or the run failed            | `HomelabError`     |
| 2         | the user's input is wrong            | `InputError`       |
| 3         | a node could not be reached          | `UnreachableError` |
| 4         | internal error (ours)                | any other          |
| 130       | interrupted                          | KeyboardInterrupt  |
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from homelab.plain import plain_lines, shortened

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130


class HomelabError(Exception):
    """Something a user can meet: a check or a run that failed.

    The words may come from a node, a file or the command line, and go to a terminal, a log or an event: nothing is left in them here
    that a terminal would obey.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = shortened(plain_lines(message))
        self.where = shortened(plain_lines(where))
        self.hint = plain_lines(hint)

    def as_dict(self) -> dict[str, str]:
        """The three parts, for `--json`."""
        return {"message": self.message, "where": self.where, "hint": self.hint}

    def __str__(self) -> str:
        parts = [self.message]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.hint:
            parts.append(f"fix: {self.hint}")
        return "\n".join(parts)


class InputError(HomelabError):
    """What the user wrote (a file, an option, a name) cannot be."""

    exit_code = EXIT_INPUT


class UnreachableError(HomelabError):
    """A node did not answer, or would not let us in."""

    exit_code = EXIT_UNREACHABLE


class SilentError(UnreachableError):
    """Nothing came back from a node's address: it is off or away, or this machine has no network itself."""


class TakenError(HomelabError):
    """Somebody else starts or recovers this run, or another one on the same node, just now. Whoever is refused has stopped nothing."""


class StoppedError(HomelabError):
    """The run was stopped by hand while it was being started."""


class SupersededError(HomelabError):
    """The run has gone on elsewhere."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the nearest known word, or an empty string when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""
