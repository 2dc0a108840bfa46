"""Small packets that are counted where they arrive."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from homelab.node.network import packet_loss
from homelab.shared.protocol.network_messages import Dials

pytestmark = pytest.mark.timeout(30)
TOKEN, OTHER = "00" * 8, "ff" * 8


@pytest.fixture
def counter() -> Iterator[packet_loss.Counter]:
    """One that counts on a socket of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        yield packet_loss.Counter(receiver)


def target(counter: packet_loss.Counter, token: str) -> dict[str, object]:
    return {"node": token, "address": "127.0.0.1", "burst": {"port": counter.receiver.getsockname()[1], "token": token}}


def test_what_is_sent_is_counted_by_its_name(counter: packet_loss.Counter) -> None:
    silent = {"node": "c", "address": "127.0.0.1"}
    assert packet_loss.send([target(counter, TOKEN), silent, target(counter, OTHER)], 40) == [40, None, 40]
    assert counter.counted({TOKEN: 40, OTHER: 40}) == Dials(links=(), counted={TOKEN: 40, OTHER: 40})


def test_what_never_came_is_not_waited_for_long(counter: packet_loss.Counter) -> None:
    packet_loss.send([target(counter, TOKEN)], 10)
    assert counter.counted({TOKEN: 30, OTHER: 5}).counted == {TOKEN: 10, OTHER: 0}


def test_a_packet_that_comes_twice_counts_once_and_others_do_not_count(counter: packet_loss.Counter) -> None:
    packet_loss.send([target(counter, TOKEN)], 10)
    packet_loss.send([target(counter, TOKEN)], 10)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"who is there", counter.receiver.getsockname())
    assert counter.counted({TOKEN: 10}).counted == {TOKEN: 10}


def test_what_a_socket_has_no_room_for_is_said(counter: packet_loss.Counter) -> None:
    counter.receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    packet_loss.send([target(counter, TOKEN)], 60)
    answer = counter.counted({TOKEN: 60})
    assert 0 < answer.counted[TOKEN] < 60 and answer.counted[TOKEN] + answer.dropped == 60
    assert counter.counted({TOKEN: 60}).dropped == 0, "of a later burst others were dropped"
