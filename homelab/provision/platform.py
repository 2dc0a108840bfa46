"""For which kind of node wheels are fetched: processor, C library, Python. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from homelab.errors import HomelabError
from homelab.models import Value
from homelab.provision.node_state import NodeState
from homelab.text.hint import Hint, homelab

# manylinux_2_17 is the oldest that uv and torch have wheels for; older names of the same (PEP 599) are still in use.
_OLDEST_GLIBC = 17
_MACHINES = ("x86_64", "aarch64")


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


def common_python(states: Mapping[str, NodeState]) -> str | None:
    """The newest Python that all of these nodes have; None where they have none in common."""
    shared = set.intersection(*(set(state.pythons) for state in states.values())) if states else set()
    return newest(shared)


def newest(versions: Iterable[str]) -> str | None:
    """3.12 of 3.9, 3.12 and 3.11."""
    return max(versions, key=lambda version: int(version.partition(".")[2]), default=None)


def platform_of(node: str, state: NodeState, python: str | None) -> Platform:
    """The node's platform with this Python, or with its newest where it has not got this one. Raises HomelabError where setup can do nothing."""
    chosen = python if python in state.pythons else newest(state.pythons)
    if chosen is None:
        raise HomelabError(
            "there is no Python 3.11 or newer on this node", where=f"node {node}, its PATH",
            hint=Hint("install Python 3.11 or newer there (with its system's package manager), then: {}", homelab("setup", node)),
        )  # fmt: skip
    glibc = re.match(r"glibc 2\.(\d{1,4})", state.libc)
    if state.machine not in _MACHINES or glibc is None or int(glibc[1]) < _OLDEST_GLIBC:
        raise HomelabError(
            f"torch has no wheels for {state.machine} with {state.libc or 'a C library that is not glibc'}", where=f"node {node}",
            hint=Hint("leave it out: {}", homelab("setup --help")),
        )  # fmt: skip
    return Platform(machine=state.machine, glibc=int(glibc[1]), python=chosen)
