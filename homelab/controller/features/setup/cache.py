"""What the controller keeps of environments: ~/.cache/homelab/setup (or below XDG_CACHE_HOME), and pip, which fills it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Command, Hint, homelab

PIP_TIMEOUT_S = 3600.0  # some gigabytes over a home line


def folder() -> Path:
    """The place of the cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "homelab" / "setup"


def made_folder() -> Path:
    """The cache, made where it was not there."""
    folder().mkdir(parents=True, exist_ok=True)
    return folder()


def pip(arguments: Iterable[str], what: str, again: Command | None = None) -> None:
    """Run this Python's pip. `what`: what it does, for its error; `again`: the command to repeat then (`homelab setup`). Raises HomelabError with pip's own words."""
    again = again or homelab("setup")
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, timeout=PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise HomelabError(f"{what}: pip has not ended within an hour", where="this machine", hint=Hint("again: {}", again)) from None
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise HomelabError("this Python has no pip", where=sys.executable, hint=Command(f"{sys.executable} -m ensurepip"))
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or done.stderr.splitlines()[
        -1:
    ]
    if any("DO NOT MATCH THE HASHES" in error for error in errors):
        hint = Hint("the index, or a proxy before it, gives another file: pip config list shows it; change it, then run again: {}", again)
        raise HomelabError(f"{what}: its digest differs from the known one; pip says: {'; '.join(errors)}", where="this machine", hint=hint)
    raise HomelabError(
        f"{what}: pip says: {'; '.join(errors) or done.returncode}", where="this machine",
        hint=Hint("can this machine reach the package index (pip config list)? Then run again: {}", again),
    )  # fmt: skip
