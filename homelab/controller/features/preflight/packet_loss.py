"""Packet loss between two nodes: bursts of small packets, counted by the receiver, and a second burst before a loss is reported."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from homelab.controller.checks.evidence import Link
from homelab.controller.checks.network.blame import Pair
from homelab.controller.remote.fanout import on_all
from homelab.shared.protocol.network_messages import Dials

PACKETS, PACKETS_OF_MANY = 300, 100  # a pair of up to eight nodes; of more, and in a recovery
_PACKETS_AGAIN = 600
LEAST_SHARE = 0.01  # of 300 packets at 5 %, three or more are missing in all but one of 20,000 bursts
# With so many lost UDP packets and fast connects, a device limits UDP, and TCP loses nothing.
_LIMITED_SHARE, _ENOUGH_PORTS = 0.3, 8
_TIMEOUT_S = 10.0

Ask = Callable[[str, Mapping[str, Any], float], Dials]


@dataclass(frozen=True)
class Burst:
    """What one node sent to another one, or was asked to."""

    token: str
    sent: int


def token() -> str:
    """A name for a burst."""
    return secrets.token_hex(8)


def with_losses(ask: Ask, links: tuple[Link, ...], bursts: Mapping[Pair, Burst], places: Mapping[str, tuple[str, int]]) -> tuple[Link, ...]:
    """The links with the share of packets each pair loses. `places`: address and port of the nodes that count.

    Only what a second burst shows as well counts; what a socket had no room for is not lost on the way. A node that does not
    answer leaves its pairs unknown.
    """
    first = _lost(ask, bursts)
    suspects = [pair for pair, (sent, lost) in first.items() if _is_much(sent, lost)]
    if not suspects:
        return links
    second = _lost(ask, _again(ask, suspects, places))
    shares = {pair: (first[pair][1] + lost) / (first[pair][0] + sent) for pair, (sent, lost) in second.items() if _is_much(sent, lost)}
    limited = {pair for pair, share in shares.items() if share >= _LIMITED_SHARE and _connects_are_clean(links, pair)}
    marked: set[Pair] = set()
    measured = []
    for link in links:
        pair = (link.source, link.target)
        if pair in shares and pair not in limited | marked:
            marked.add(pair)
            link = replace(link, loss=shares[pair])
        measured.append(link)
    return tuple(measured)


def _is_much(sent: int, lost: int) -> bool:
    return lost > 0 and lost >= LEAST_SHARE * sent


def _lost(ask: Ask, bursts: Mapping[Pair, Burst]) -> dict[Pair, tuple[int, int]]:
    """{pair: (packets sent, packets that never arrived)}; without the pairs of which none arrived: UDP is blocked there."""

    def counted(name: str) -> Dials:
        return ask(name, {"counted": {one.token: one.sent for (_, target), one in bursts.items() if target == name}}, _TIMEOUT_S)

    answers, _ = on_all(sorted({target for _, target in bursts}), counted)
    loss_of = {}
    for (source, target), burst in bursts.items():
        if target in answers and answers[target].counted.get(burst.token, 0) > 0:
            arrived = answers[target].counted[burst.token] + answers[target].dropped
            loss_of[source, target] = (burst.sent, max(0, burst.sent - arrived))
    return loss_of


def _again(ask: Ask, pairs: Collection[Pair], places: Mapping[str, tuple[str, int]]) -> dict[Pair, Burst]:
    tokens = {pair: token() for pair in pairs}

    def send(source: str) -> Sequence[Any]:
        targets = [
            {"node": to, "address": places[to][0], "burst": {"port": places[to][1], "token": tokens[of, to]}}
            for of, to in pairs
            if of == source
        ]
        return ask(source, {"burst": targets, "packets": _PACKETS_AGAIN}, _TIMEOUT_S).links

    answers, _ = on_all(sorted({source for source, _ in pairs}), send)
    return {
        (source, entry.node): Burst(tokens[source, entry.node], entry.sent)
        for source, entries in answers.items()
        for entry in entries
        if entry.sent and (source, entry.node) in tokens
    }


def _connects_are_clean(links: tuple[Link, ...], pair: Pair) -> bool:
    own = [link for link in links if (link.source, link.target) == pair]
    return len(own) >= _ENOUGH_PORTS and not any(link.error or link.repeats for link in own)
