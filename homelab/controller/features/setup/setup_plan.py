"""What one node lacks, and the steps that bring it there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.controller.base.units import decimal_size
from homelab.controller.features.setup.requirements import Lock
from homelab.shared.protocol.setup_messages import SetupState

_SPARE_BYTES = 200_000_000  # for what else writes to that disk meanwhile
_MOST_NAMED = 6


class NeededFile(Value):
    """A file that a node needs. `name`: its place in the folder of setup there."""

    name: str
    sha256: str
    size_bytes: int
    unpacked_bytes: int = 0


class Difference(Value):
    """What an environment has, and what it should have: package -> (version there or "", version wanted or "")."""

    packages: dict[str, tuple[str, str]]
    is_whole: bool  # nothing is to be done
    size_bytes: int = 0  # of the wheels to install, as far as their servers say

    @property
    def text(self) -> str:
        """One line for a person."""
        if self.is_whole:
            return "nothing to do"
        missing = [name for name, (old, _) in self.packages.items() if not old]
        other = [f"{name} {old} -> {new}" for name, (old, new) in self.packages.items() if old and new]
        extra = [name for name, (_, new) in self.packages.items() if not new]
        parts = [f"{words} {_some(names)}" for words, names in (("install", missing), ("exchange", other), ("remove", extra)) if names]
        if self.size_bytes:
            parts.append(f"{decimal_size(self.size_bytes)} of wheels")
        return "; ".join(parts) or "make it again: it is not complete, or has another Python"


def _some(names: Sequence[str]) -> str:
    """The first six names; a whole environment has sixty."""
    shown, more = names[:_MOST_NAMED], len(names) - _MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


class SetupPlan(Value):
    """`parts`: the files to send. `send_bytes`: without what has come already; `disk_bytes`: what it takes on the node's disk."""

    parts: tuple[NeededFile, ...]
    send_bytes: int
    disk_bytes: int


def difference(state: SetupState, lock: Lock, python: str) -> Difference:
    """Between what the node has and the lock. An environment with another Python (x.y) is made anew."""
    has = state.packages if state.environment_is_ours else {}
    names = sorted({*has, *lock.versions})
    packages = {name: (has.get(name, ""), lock.versions.get(name, "")) for name in names if has.get(name) != lock.versions.get(name)}
    same_python = state.environment_python.rpartition(".")[0] == python
    size_bytes = sum(package.size_bytes for package in lock.packages if packages.get(package.name, ("", ""))[1])
    return Difference(packages=packages, size_bytes=size_bytes, is_whole=not packages and same_python and state.lock == lock.digest)


def is_somebodys(state: SetupState) -> bool:
    """Whether a Python that setup has not made works there. Its owner installs into it: setup changes nothing, and preflight says whether it is fit."""
    return state.environment_exists and not state.environment_is_ours and bool(state.environment_python)


def check_environment(node: str, environment: str, state: SetupState) -> None:
    """Raises HomelabError if a folder lies there that setup has not made and whose Python does not start: installing would remove its owner's files."""
    if state.environment_exists and not state.environment_is_ours and not is_somebodys(state):
        raise HomelabError(
            "there is a folder that homelab setup did not make, and its Python does not start", where=f"node {node}, {environment}",
            hint=Hint("move it away, or edit cluster.toml, node {}: python = another folder's bin/python; then: {}", node, homelab("setup", node)),
        )  # fmt: skip


def plan(state: SetupState, parts: Sequence[NeededFile]) -> SetupPlan:
    """The files that the node lacks. Wheels are unpacked beside what is there: room is needed for all of them."""
    lacking = tuple(part for part in parts if part.name not in state.good)
    send_bytes = sum(part.size_bytes - min(state.partial.get(part.name, 0), part.size_bytes) for part in lacking)
    return SetupPlan(parts=lacking, send_bytes=send_bytes, disk_bytes=send_bytes + sum(part.unpacked_bytes for part in parts))


def check_room(node: str, state: SetupState, steps: SetupPlan) -> None:
    """Raises HomelabError where the disk has not room for what is coming."""
    needed = steps.disk_bytes + _SPARE_BYTES
    if state.disk_free < needed:
        raise HomelabError(
            f"the disk has {decimal_size(state.disk_free)} free, and the environment needs {decimal_size(needed)}", where=f"node {node}",
            hint=Hint("make room there, or edit cluster.toml, node {}: python = a folder on another disk; then: {}", node, homelab("setup", node)),
        )  # fmt: skip


@dataclass(frozen=True)
class SetupOptions:
    """`check`: only compare. `upgrade`: the newest versions instead of those that were resolved first.

    `fetches_here`: no node fetches a package from the index. `between_nodes`: what this machine has goes to one node, and from there to the others.
    """

    check: bool = False
    upgrade: bool = False
    fetches_here: bool = False
    between_nodes: bool = False
