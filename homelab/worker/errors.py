"""What can go wrong in a worker, in the three parts that a user needs."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from homelab.shared.protocol.errors import EXIT_FAILED, EXIT_INPUT, ThreePartError

_FULL_BYTES = 1 << 20  # a disk with less than this free has refused a write


class WorkerError(ThreePartError):
    """A fault that a user can fix: what was seen, where (file, line, key, step, rank), and the edit or command that fixes it.

    `needs_launch`: the fix changes the recipe, so it is a new training; a recovery goes on with the old one.
    """

    exit_code = EXIT_INPUT

    def __init__(self, message: str, *, where: str = "", hint: str = "", needs_launch: bool = False) -> None:
        super().__init__(message, where=where, hint=hint)
        self.needs_launch = needs_launch


class TrainingError(WorkerError):
    """The input was accepted, but the training went wrong (a loss that is not a number)."""

    exit_code = EXIT_FAILED


def first_words(error: BaseException) -> str:
    """One line of an error that is not ours: its type, its first line (torch's C++ stack comes after it), and for NCCL what failed and its
    last error, which torch puts behind that (NCCLUtils.cpp, getNcclErrorDetailStr).
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    words = lines[:1]
    if "Last error:" in lines[:10]:
        last = lines.index("Last error:")
        words += [line for line in (*lines[1:last], *lines[last + 1 : last + 2]) if line]
    return f"{type(error).__name__}: {'; '.join(words)}"


def size_words(size_bytes: int) -> str:
    """1.3 GB, 20.1 MB: decimal, as `df -H` and disks count."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} bytes"


def disk_fault(error: Exception, root: Path) -> str | None:
    """Why the disk of `root` has refused a write, as the system says it; None when `error` has another reason."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors names it so
    if code:
        return os.strerror(int(code[1]))
    # torch's zip writer does not mention the disk.
    try:
        return os.strerror(errno.ENOSPC) if shutil.disk_usage(root).free <= _FULL_BYTES else None
    except OSError as gone:  # the folder itself
        return gone.strerror or str(gone)
