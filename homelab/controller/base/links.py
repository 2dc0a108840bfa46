"""Symbolic links among what is sent to the nodes: one that leaves its folder would send a file that nobody has named."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from homelab.controller.base.errors import InputError


def refuse_leaving(path: Path, folder: Path, where: str) -> None:
    """Raises InputError for what lies in the folder by its name alone: a link to another place, or to what is hidden, or one that leads nowhere."""
    home = Path(os.path.realpath(folder))
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # gone, or links in a circle
        if not path.is_symlink():
            return
        raise _refusal(path, "leads nowhere", where, f"rm {shlex.quote(str(path))}") from None
    if real.is_relative_to(home) and not any(part.startswith(".") and part != ".." for part in real.relative_to(home).parts):
        return
    name = shlex.quote(str(path))
    copy = f"cp -RL {name} {name}.copy && rm {name} && mv {name}.copy {name}"
    what = f"leads out of the folder, to {real}" if not real.is_relative_to(home) else f"leads to a hidden file of the folder, {real}"
    raise _refusal(path, what, where, f"to send it, replace the link by a copy: {copy}; if not, remove the link, or add it to .gitignore")


def _refusal(path: Path, what: str, where: str, hint: str) -> InputError:
    return InputError(f"the link {path.name} {what}", where=where, hint=hint)
