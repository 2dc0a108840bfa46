"""What can go wrong in a worker, in the three parts that a user needs. The worker cannot import `homelab.errors`: it is shipped alone."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_INPUT = 2


class WorkerError(Exception):
    """Something a user can meet: what was seen, where (file, line, key, step, rank), and the edit or command that mends it."""

    exit_code = EXIT_INPUT

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def as_dict(self) -> dict[str, str]:
        """The three parts, as they stand in error.json."""
        return {"message": self.message, "where": self.where, "hint": self.hint}

    def __str__(self) -> str:
        parts = [f"error: {self.message}"]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.hint:
            parts.append(f"fix: {self.hint}")
        return "\n".join(parts)


class TrainingError(WorkerError):
    """The input was accepted, but the training went wrong (a loss that is not a number)."""

    exit_code = EXIT_FAILED


def first_words(error: BaseException) -> str:
    """What an error that is not ours says, on one line: its type, its first line (torch's C++ stack comes after it), and for NCCL what failed
    and its last error, which torch puts behind that (NCCLUtils.cpp, getNcclErrorDetailStr).
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    words = lines[:1]
    if "Last error:" in lines[:10]:
        last = lines.index("Last error:")
        words += [line for line in (*lines[1:last], *lines[last + 1 : last + 2]) if line]
    return f"{type(error).__name__}: {'; '.join(words)}"
