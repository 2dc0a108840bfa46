"""The streams of an attempt: each node's last line, from nodes that say nonsense, end, break off and come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.base.errors import UnreachableError
from homelab.controller.facts.reading import read
from homelab.controller.features.supervise import status_streams
from homelab.controller.features.supervise.status_streams import StatusStreams
from homelab.controller.remote.session import Stream
from tests import builders
from tests.fakes import FakeFleet, FakeStream

pytestmark = pytest.mark.timeout(60)
NAMES = ["tower", "laptop"]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(status_streams, "_AGAIN_S", 0.01)
    monkeypatch.setattr(status_streams, "_LOOK_S", 0.01)
    fleet = FakeFleet(tmp_path, NAMES).answer("free-port", {"port": builders.PORT})
    for node in fleet.nodes.values():
        node.streams["follow"] = [builders.raw_status(step=7)]
    return fleet.replace_connections(monkeypatch)


@pytest.fixture
def streams(fleet: FakeFleet) -> Iterator[StatusStreams]:
    with StatusStreams(fleet.cluster, builders.RUN, 1, NAMES) as streams:
        yield streams
    for node in fleet.nodes.values():  # no thread waits for a line that never comes
        node.cut()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.005)


def step_of(streams: StatusStreams, name: str) -> int | None:
    status = streams.statuses().get(name)
    return status.ranks[0].step if status else None


def test_the_last_line_of_each_node_counts(fleet: FakeFleet, streams: StatusStreams) -> None:
    until(lambda: [step_of(streams, name) for name in NAMES] == [7, 7])
    fleet.nodes["laptop"].say(builders.raw_status(step=8))
    until(lambda: step_of(streams, "laptop") == 8)
    assert step_of(streams, "tower") == 7
    assert [entry["run"] for entry in fleet.nodes["tower"].requests if entry["verb"] == "follow"] == [builders.RUN]


def test_every_line_is_answered(fleet: FakeFleet, streams: StatusStreams) -> None:
    """A node that hears nobody stops itself."""
    until(lambda: step_of(streams, "tower") == 7)
    fleet.nodes["tower"].say(builders.raw_status(step=8))
    until(lambda: fleet.nodes["tower"].opened[-1].written == [b"\n", b"\n"])


def test_a_node_without_this_code_is_sent_it(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor of a newer homelab: the shell ends before there is an agent, until a question has brought the code."""
    tower = fleet.nodes["tower"]
    opens = tower.open

    def opened(command: str, *, stdin: bytes = b"") -> Stream:
        if "free-port" in [entry["verb"] for entry in tower.requests]:
            return opens(command, stdin=stdin)
        ended = FakeStream([])
        ended._lines = queue.SimpleQueue()
        ended.say(b"")
        return ended

    monkeypatch.setattr(tower, "open", opened)
    with StatusStreams(fleet.cluster, builders.RUN, 1, NAMES) as streams:
        until(lambda: [step_of(streams, name) for name in NAMES] == [7, 7])
    assert [entry["verb"] for entry in fleet.nodes["laptop"].requests] == ["follow"], "who has it is asked nothing more"
    for node in fleet.nodes.values():
        node.cut()


@pytest.mark.parametrize("nonsense", [b'{"attempt": 1, "ranks": {"0"', b"Welcome!", b"[]", b'{"attempt": "first"}', b"\xff"])
def test_what_is_no_status_counts_as_not_said(fleet: FakeFleet, streams: StatusStreams, nonsense: bytes) -> None:
    until(lambda: step_of(streams, "tower") == 7)
    fleet.nodes["tower"].say(nonsense)
    fleet.nodes["tower"].say(builders.raw_status(step=8))
    until(lambda: step_of(streams, "tower") == 8)
    assert len(fleet.nodes["tower"].opened) == 1, "the stream goes on"


def test_a_stream_that_ends_is_opened_again(fleet: FakeFleet, streams: StatusStreams) -> None:
    until(lambda: step_of(streams, "tower") == 7)
    fleet.nodes["tower"].streams["follow"] = [builders.raw_status(step=9)]
    fleet.nodes["tower"].opened[0].say(b"")
    until(lambda: step_of(streams, "tower") == 9)
    assert fleet.nodes["tower"].opened[0].is_closed


def test_a_node_that_is_cut_off_grows_silent_until_it_is_back(fleet: FakeFleet, streams: StatusStreams) -> None:
    until(lambda: [step_of(streams, name) for name in NAMES] == [7, 7])
    laptop = fleet.nodes["laptop"]
    laptop.streams["follow"] = [builders.raw_status(step=9)]
    laptop.cut()
    until(lambda: streams.statuses()["laptop"].heard_s > 0.1)
    assert step_of(streams, "laptop") == 7, "its last word stays"
    laptop.is_off = False
    until(lambda: step_of(streams, "laptop") == 9)
    assert streams.statuses()["laptop"].heard_s < 5.0


def test_who_never_spoke_is_missing(fleet: FakeFleet, streams: StatusStreams) -> None:
    until(lambda: step_of(streams, "tower") == 7)
    del fleet.nodes["laptop"].streams["follow"]  # it refuses now
    with StatusStreams(fleet.cluster, builders.RUN, 2, NAMES) as anew:
        until(lambda: "tower" in anew.statuses())
        until(lambda: len(fleet.nodes["laptop"].opened) > 3)
        assert "laptop" not in anew.statuses(), "a refusal is no status"


def test_a_wait_ends_with_the_next_word(fleet: FakeFleet, streams: StatusStreams) -> None:
    until(lambda: [step_of(streams, name) for name in NAMES] == [7, 7])
    began_s = time.monotonic()
    streams.wait(0.1)
    assert time.monotonic() - began_s > 0.05, "nobody speaks"
    waiting = threading.Thread(target=streams.wait, args=(300.0,), daemon=True)
    waiting.start()

    def is_over() -> bool:
        fleet.nodes["tower"].say(builders.raw_status(step=8))
        return not waiting.is_alive()

    until(is_over)


def test_a_question_does_not_wait_for_a_node_that_fell_silent(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = StatusStreams(fleet.cluster, builders.RUN, 1, NAMES)
    line = read(NodeStatus, builders.raw_status())
    heard = {"tower": line, "laptop": line.replace(heard_s=30.0)}
    monkeypatch.setattr(streams, "statuses", lambda: heard)

    def is_given_up(name: str) -> bool:
        try:
            fleet.agent(name)
        except UnreachableError as error:
            return "it has sent nothing" in error.message
        return False

    with streams.letting_go(fleet):
        until(lambda: is_given_up("laptop"))
    assert not is_given_up("tower")
