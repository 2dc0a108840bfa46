"""Packages that only the controller needs, for what not everybody uses: whether they are there, and how they get there."""

from __future__ import annotations

import importlib.util
import shlex
import sys

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Command


def install(*requirements: str) -> Command:
    """The command that installs them for the Python of this process. It names no extra of ours: on PyPI our command's name is a stranger's program."""
    # An environment of uv, also that of `uv tool install` and `uvx`, holds no pip.
    has_pip = importlib.util.find_spec("pip") is not None
    words = (sys.executable, "-m", "pip", "install") if has_pip else ("uv", "pip", "install", "--python", sys.executable)
    return Command(" ".join(shlex.quote(word) for word in (*words, *requirements)))


def require(module: str, *requirements: str) -> None:
    """Raises HomelabError if the module is not installed for the Python of this process. `requirements`: what pip is asked for."""
    if importlib.util.find_spec(module) is None:
        raise HomelabError(
            f"the package {module} is not installed on this machine (the nodes need nothing for it)",
            where=f"the Python that homelab runs in, {sys.executable}",
            hint=install(*requirements or (module,)),
        )
