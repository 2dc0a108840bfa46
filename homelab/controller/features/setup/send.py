"""Brings files to a node in pieces: sent over the connection that is there, or fetched by the node itself. The node says from where to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.controller.remote.agent import Agent
from homelab.shared.protocol.message import fields
from homelab.shared.protocol.setup_messages import FetchRequest, PieceRequest

PIECE_BYTES = 32 << 20
_FETCHED_BYTES = 128 << 20  # a request more costs a handshake
_PIECE_TIMEOUT_S = 900.0  # 70 kB/s
_MOST_BEGINNINGS = 3


@dataclass(frozen=True)
class Target:
    """The verb of the node that takes pieces, and the model that they are of."""

    verb: str
    model: str = ""
    commit: str = ""


def file(agent: Agent, target: Target, part: NeededFile, source: Path, have: int, told: Callable[[int], None]) -> None:
    """Send a file of which the node has `have` bytes; `told` gets how many more it has after every piece.

    Raises HomelabError where it arrives damaged again and again, UnreachableError.
    """
    with source.open("rb") as stream:

        def step(offset: int) -> int:
            stream.seek(offset)
            return int(
                agent.send(target.verb, _request(target, part, offset), stream.read(PIECE_BYTES), timeout_s=_PIECE_TIMEOUT_S)["have"]
            )

        _until_whole(agent, part, str(source), have, told, step)


def fetched(agent: Agent, target: Target, part: NeededFile, address: str, have: int, told: Callable[[int], None]) -> HomelabError | None:
    """The same, but the node fetches it from this address. Why it could not, or None. Raises UnreachableError where the node itself is gone."""
    environment = agent.node.environment
    proxies = {
        scheme: value
        for scheme in ("http", "https")
        if (value := environment.get(f"{scheme}_proxy") or environment.get(f"{scheme.upper()}_PROXY"))
    }

    def step(offset: int) -> int:
        request = FetchRequest(**fields(_request(target, part, offset)), url=address, most=_FETCHED_BYTES, proxies=proxies)
        return int(agent.ask("setup-fetch", request, timeout_s=_PIECE_TIMEOUT_S)["have"])

    try:
        _until_whole(agent, part, address, have, told, step)
    except UnreachableError:
        raise
    except HomelabError as error:
        return error
    return None


def _request(target: Target, part: NeededFile, offset: int) -> PieceRequest:
    return PieceRequest(name=part.name, sha256=part.sha256, size=part.size_bytes, offset=offset, model=target.model, commit=target.commit)


def _until_whole(agent: Agent, part: NeededFile, source: str, have: int, told: Callable[[int], None], step: Callable[[int], int]) -> None:
    beginnings = 0
    while True:
        before, have = have, step(have)
        told(have - before)
        if have == part.size_bytes:
            return
        beginnings += have <= before  # another sender, or a damaged file that begins anew
        if beginnings > _MOST_BEGINNINGS or have > part.size_bytes:
            raise HomelabError(
                f"{part.name} arrived damaged {beginnings} times",
                where=f"node {agent.node.name}, from {source}",
                hint=homelab("setup", agent.node.name),
            )
