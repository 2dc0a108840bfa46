"""The three parts of every error that a user can meet, and the exit codes of the programs.

| exit code | meaning                     |
|-----------|-----------------------------|
| 0         | done                        |
| 1         | a check or the run failed   |
| 2         | the user's input is wrong   |
| 3         | a node cannot be reached    |
| 4         | internal error (ours)       |
| 130       | interrupted                 |

A worker's program for a question has one more: `EXIT_NO_ROOM`.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_INTERNAL = 4
EXIT_NO_ROOM = 5  # there is no memory for the model on this node
EXIT_INTERRUPTED = 130

_LABELS = (("error", "message"), ("where", "where"), ("fix", "hint"))


class ThreePartError(Exception):
    """What was seen (`message`), where (node, file, line, key, step or rank), and the command or edit that fixes it (`hint`)."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def as_dict(self) -> dict[str, str]:
        """The three parts, for JSON."""
        return {"message": self.message, "where": self.where, "hint": self.hint}

    def __str__(self) -> str:
        parts = [self.message]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.hint:
            parts.append(f"fix: {self.hint}")
        return "\n".join(parts)

    @property
    def text(self) -> str:
        """The lines that a program prints on stderr; `parts_of` reads them."""
        return f"error: {self}"


class Refusal(ThreePartError, ValueError):
    """The node program does not do what was asked. `kind` is for the program that asked: "refused", "full", "busy", ..."""

    def __init__(self, message: str, *, where: str = "", hint: str = "", kind: str = "refused") -> None:
        super().__init__(message, where=where, hint=hint)
        self.kind = kind


def parts_of(text: str) -> dict[str, str]:
    """{"message", "where", "hint"} of an error that another program printed; {} where it printed none."""
    parts = {}
    for line in text.splitlines():
        for label, part in _LABELS:
            if line.startswith(f"{label}: "):
                parts[part] = line[len(label) + 2 :]
    return parts if "message" in parts else {}
