"""Sends files to a node in pieces, over the connection that is there: the node says from where to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from homelab.errors import HomelabError
from homelab.provision.setup_plan import Part
from homelab.remote.agent import Agent
from homelab.text.hint import homelab

PIECE_BYTES = 32 << 20
_PIECE_TIMEOUT_S = 900.0  # 70 kB/s
_MOST_BEGINNINGS = 3


@dataclass(frozen=True)
class Target:
    """The verb of the node that takes pieces, and what it wants to be told besides."""

    verb: str
    request: Mapping[str, str]


def file(agent: Agent, target: Target, part: Part, source: Path, have: int, told: Callable[[int], None]) -> None:
    """Send a file of which the node has `have` bytes; `told` gets how many more it has after every piece.

    Raises HomelabError where it arrives damaged again and again, UnreachableError.
    """
    beginnings = 0
    with source.open("rb") as stream:
        while True:
            stream.seek(have)
            request = {**target.request, "name": part.name, "sha256": part.sha256, "size": part.size_bytes, "offset": have}
            before, have = have, agent.send(target.verb, request, stream.read(PIECE_BYTES), timeout_s=_PIECE_TIMEOUT_S)["have"]
            told(have - before)
            if have == part.size_bytes:
                return
            beginnings += have <= before  # another sender, or a damaged file that begins anew
            if beginnings > _MOST_BEGINNINGS or have > part.size_bytes:
                raise HomelabError(
                    f"{part.name} arrived damaged {beginnings} times", where=f"node {agent.node.name}, from {source}", hint=homelab("setup", agent.node.name)
                )
