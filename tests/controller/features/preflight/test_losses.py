"""Which pairs lose packets, from what was sent and what was counted: a second burst decides, and no busy machine looks like a bad cable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.checks.evidence import Link
from homelab.controller.checks.network.blame import Pair
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight import packet_loss
from homelab.controller.features.preflight.packet_loss import Burst
from homelab.shared.protocol.network_messages import Dials
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)
PAIRS = [(a, b) for a in healthy.NAMES for b in healthy.NAMES if a != b]
PLACES = dict.fromkeys(healthy.NAMES, ("192.0.2.1", 40000))
BAD = ("laptop", "tower")


class Nodes:
    """What the nodes count: `arrives(pair, look)` is the share of the packets of the first (0) and second (1) burst."""

    def __init__(self, arrives: Callable[[Pair, int], float], dropped: int = 0) -> None:
        self.arrives, self.dropped = arrives, dropped
        self.sent = {f"{number:016x}": (pair, 300, 0) for number, pair in enumerate(PAIRS)}
        self.again: list[Pair] = []

    def ask(self, name: str, request: Mapping[str, Any], timeout_s: float) -> Dials:
        if "burst" in request:
            for target in request["burst"]:
                pair = (name, target["node"])
                self.again.append(pair)
                self.sent[target["burst"]["token"]] = (pair, request["packets"], 1)
            return read(Dials, {"links": [
                {"node": target["node"], "address": target["address"], "port": 0, "sent": request["packets"]} for target in request["burst"]
            ]})  # fmt: skip
        counted = {}
        for token in request["counted"]:
            pair, sent, look = self.sent[token]
            assert pair[1] == name
            counted[token] = round(sent * self.arrives(pair, look))
        return read(Dials, {"links": [], "counted": counted, "dropped": self.dropped})

    def found(self, links: tuple[Link, ...] | None = None) -> dict[Pair, float]:
        bursts = {pair: Burst(token, sent) for token, (pair, sent, _) in list(self.sent.items())}
        judged = packet_loss.with_losses(self.ask, healthy.cpu().links if links is None else links, bursts, PLACES)
        assert len({(link.source, link.target) for link in judged if link.loss}) == sum(bool(link.loss) for link in judged)
        return {(link.source, link.target): link.loss for link in judged if link.loss is not None}


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.6])
def test_what_is_lost_twice_is_lost_in_its_direction(share: float) -> None:
    nodes = Nodes(lambda pair, look: 1 - share if pair == BAD else 1.0)
    found = nodes.found()
    assert set(found) == {BAD} and found[BAD] == pytest.approx(share, abs=0.005)
    assert nodes.again == [BAD], "only who lost any is asked again"


def test_nothing_is_asked_again_where_all_arrives() -> None:
    nodes = Nodes(lambda pair, look: 1.0)
    assert nodes.found() == {} and nodes.again == []


def test_what_is_lost_once_is_not_said() -> None:
    nodes = Nodes(lambda pair, look: 0.8 if pair == BAD and look == 0 else 1.0)
    assert nodes.found() == {} and nodes.again == [BAD]


def test_what_a_busy_node_had_no_room_for_is_not_lost_on_the_way() -> None:
    assert Nodes(lambda pair, look: 0.8 if pair[1] == "tower" else 1.0, dropped=200).found() == {}


def test_where_none_arrives_nothing_is_known() -> None:
    """UDP is blocked; the dials say what there is to say."""
    assert Nodes(lambda pair, look: 0.0 if pair[1] == "tower" else 1.0).found() == {}


def clean(ports: int = 8, **changes: Any) -> tuple[Link, ...]:
    first = Link(*BAD, "192.0.2.1", 41000, False, latency_ms=0.2)
    return (replace(first, **changes), *(replace(first, port=41000 + number) for number in range(1, ports)))


def test_a_limit_on_udp_is_no_loss() -> None:
    limited = lambda pair, look: 0.3 if pair == BAD else 1.0  # noqa: E731
    assert Nodes(limited).found(clean()) == {}, "of eight ports each opened at once"
    assert set(Nodes(limited).found(clean(repeats=1))) == set(Nodes(limited).found(clean(error="no answer"))) == {BAD}
    assert set(Nodes(lambda pair, look: 0.8 if pair == BAD else 1.0).found(clean())) == {BAD}


@pytest.mark.parametrize("silent", ["counted", "burst"])
def test_a_node_that_stops_answering_leaves_its_pairs_unknown(silent: str) -> None:
    nodes = Nodes(lambda pair, look: 0.8 if pair == BAD else 1.0)
    asked = nodes.ask

    def ask(name: str, request: Mapping[str, Any], timeout_s: float) -> Dials:
        if silent in request and name == ("tower" if silent == "counted" else "laptop"):
            raise HomelabError("gone")
        return asked(name, request, timeout_s)

    nodes.ask = ask
    assert nodes.found() == {}
