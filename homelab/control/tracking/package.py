"""Packages that only a forwarder on the controller needs: whether they are there, and how they get there."""

from __future__ import annotations

import importlib.util
import shlex
import sys

from homelab.errors import HomelabError
from homelab.text.hint import Command


def require(module: str, requirement: str = "") -> None:
    """Raises HomelabError where the module is not installed for the Python of this process. `requirement`: what pip is asked for."""
    if importlib.util.find_spec(module) is None:
        python = shlex.quote(sys.executable)
        raise HomelabError(
            f"the package {module} is not installed on this machine (the nodes need nothing for it)",
            where=f"the Python that homelab runs in, {sys.executable}",
            hint=Command(f"{python} -m pip install {shlex.quote(requirement or module)}"),
        )
