"""For which kind of node wheels are fetched: processor, C library, Python. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.shared.protocol.setup_messages import SetupState

# manylinux_2_17 is the oldest that uv and torch have wheels for; older names of the same (PEP 599) are still in use.
_OLDEST_GLIBC = 17
_MACHINES = ("x86_64", "aarch64")
SENT_PYTHON = "3.12"  # where no node has one that is new enough


class Platform(Value):
    """`glibc`: the second number of its version, 36 for glibc 2.36. `python`: "3.12"."""

    machine: str
    glibc: int
    python: str

    @property
    def tags(self) -> tuple[str, ...]:
        """What pip's --platform has to name, the newest first: pip takes each of them literally."""
        numbered = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, _OLDEST_GLIBC - 1, -1)]
        return (*numbered, f"manylinux2014_{self.machine}", f"linux_{self.machine}")

    @property
    def name(self) -> str:
        """One word for a folder."""
        return f"{self.machine}-glibc2.{self.glibc}-python{self.python}"


def fleet_python(states: Mapping[str, SetupState]) -> str:
    """The Python of all of these nodes: the newest that all have, else the newest of those that most have, else one that is sent.

    One for all, because each Python has wheels of its own, and so a lock of its own.
    """
    holders = Counter(version for state in states.values() for version in state.pythons)
    return max(holders, key=lambda version: (holders[version], int(version.partition(".")[2])), default=SENT_PYTHON)


def platform_of(node: str, state: SetupState, python: str) -> Platform:
    """The node's platform with this Python. Raises HomelabError where torch has no wheels for the node."""
    glibc = re.match(r"glibc 2\.(\d{1,4})", state.libc)
    if state.machine not in _MACHINES or glibc is None or int(glibc[1]) < _OLDEST_GLIBC:
        raise HomelabError(
            f"torch has no wheels for {state.machine} with {state.libc or 'a C library that is not glibc'}", where=f"node {node}",
            hint=Hint("leave it out: {}", homelab("setup --help")),
        )  # fmt: skip
    return Platform(machine=state.machine, glibc=int(glibc[1]), python=python)
