"""The controller's side of the dials: nodes that fail, nodes that lie, and a second look before a wire is called slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.network import bandwidth, connectivity
from homelab.controller.features.preflight import link_tests
from homelab.controller.remote.fanout import Fleet
from homelab.node import verbs
from homelab.shared.protocol.message import Message, as_json
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(30)
Answer = Callable[[str, dict[str, Any]], Any]
NAMES = healthy.NAMES


class Node:
    """A fleet, an agent and a stream in one: what a node says is up to `answer(name, request)`; "" ends its words."""

    def __init__(self, answer: Answer, name: str = "") -> None:
        self.answer, self.name, self.lines = answer, name, list[bytes]()

    def agent(self, name: str) -> Node:
        return Node(self.answer, name)

    def open(self, verb: str, request: Message) -> Node:
        assert verb == "meet"
        self._say(self.answer(self.name, as_json(request)))
        return self

    def write(self, line: bytes) -> None:
        self._say(self.answer(self.name, json.loads(line)))

    def _say(self, said: Any) -> None:
        if isinstance(said, HomelabError):
            raise said
        self.lines.append(said if isinstance(said, bytes) else json.dumps(said).encode())

    def readline(self, timeout_s: float) -> bytes:
        return self.lines.pop(0)

    def close(self) -> None:
        pass


def well(name: str, request: dict[str, Any]) -> Any:
    """A node on which all is well, on a wire of 1 Gbit/s."""
    if "address" in request:
        return {"ports": [41000, 41001], "rendezvous": request["port"], "udp": 42000, "error": None}
    if "dial" in request:
        return {"links": [
            {"node": target["node"], "address": target["address"], "port": int(port), "error": None, "latency_ms": 0.2}
            for target in request["dial"] for port in target["ports"]
        ]}  # fmt: skip
    return {"links": [{**target, "error": None, "throughput_bytes_per_s": 117e6} for target in request["send"]]}


def dialled(answer: Answer, names: tuple[str, ...] = NAMES) -> Evidence:
    """The evidence with the links that these nodes make."""
    seen = replace(healthy.cpu(names=names), links=())
    return replace(seen, links=link_tests.between(cast(Fleet, Node(answer)), seen, measure_wire=True))


def test_every_pair_is_dialled_and_measured() -> None:
    asked: list[dict[str, Any]] = []

    def noted(name: str, request: dict[str, Any]) -> Any:
        asked.append(request)
        return well(name, request)

    evidence = dialled(noted)
    pairs = {(source, target) for source in NAMES for target in NAMES if source != target}
    assert {(link.source, link.target) for link in evidence.links} == set(evidence.throughputs) == pairs
    assert {link.target for link in evidence.links if link.is_rendezvous} == {"tower"}
    assert not list(connectivity.reach(evidence)) and not list(bandwidth.throughput(evidence))
    assert {target["packet_bytes"] for request in asked for target in request.get("dial", [])} == {1500}


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"Segmentation fault",
        {"links": [{"node": "tower", "address": "x", "port": "all"}]},
        {"error": {"message": "no", "kind": "internal"}},
    ],
)
def test_a_node_that_does_not_dial_is_a_finding_on_that_node(broken: Any) -> None:
    evidence = dialled(lambda name, request: broken if name == "laptop" and "dial" in request else well(name, request))
    ((node, problem),) = connectivity.reach(evidence)
    assert node == "laptop" and "could not be tested" in problem.message and problem.hint


@pytest.mark.parametrize("order", ["address", "dial"])
def test_an_agent_that_failed_is_quoted(order: str) -> None:
    failed = {"error": {"message": "Too many open files\x1b[2J", "kind": "refused", "trace": None, "where": None, "hint": None}}
    evidence = dialled(lambda name, request: failed if name == "laptop" and order in request else well(name, request))
    ((node, problem),) = connectivity.reach(evidence)
    assert node == "laptop" and "its agent failed: Too many open files" in problem.message and "\x1b" not in problem.message
    assert "never sends" not in problem.message


def test_an_error_of_the_system_without_a_file_names_none() -> None:
    assert verbs.refusal_of(OSError(22, "Invalid argument"))["message"] == "Invalid argument"
    assert verbs.refusal_of(OSError(2, "No such file or directory", "/a"))["message"] == "No such file or directory: /a"


@pytest.mark.parametrize("names", [NAMES, ("tower", "laptop")])
def test_a_node_that_cannot_listen_is_a_finding_on_that_node(names: tuple[str, ...]) -> None:
    refused = {"ports": [], "rendezvous": None, "udp": None, "error": "Cannot assign requested address"}
    evidence = dialled(lambda name, request: refused if name == "laptop" and "address" in request else well(name, request), names)
    ((node, problem),) = connectivity.reach(evidence)
    assert node == "laptop" and "could not listen on 192.168.1.101: Cannot assign requested address" in problem.message


def test_what_a_node_says_is_shown_without_what_a_terminal_would_obey() -> None:
    def lies(name: str, request: dict[str, Any]) -> Any:
        answer = well(name, request)
        if name == "laptop" and "dial" in request:
            answer["links"][0]["error"] = "\x1b[2Jall is well"
        return answer

    ((_, problem),) = connectivity.reach(dialled(lies))
    assert "all is well" in problem.message and problem.message.isprintable()


def test_what_is_slow_only_while_all_others_send_is_not_slow() -> None:
    def busy(name: str, request: dict[str, Any]) -> Any:
        answer = well(name, request)
        if "send" in request and len(request["send"]) > 1 and name == "laptop":
            answer["links"] = [{**entry, "throughput_bytes_per_s": 9e6} for entry in answer["links"]]
        return answer

    assert set(dialled(busy).throughputs.values()) == {117e6}


def test_what_is_slow_alone_too_is_slow() -> None:
    counts: list[int] = []

    def slow(name: str, request: dict[str, Any]) -> Any:
        answer = well(name, request)
        if "send" in request:
            counts.append(len(request["send"]))
            pairs = [(name, entry["node"]) for entry in answer["links"]]
            answer["links"] = [
                {**entry, "throughput_bytes_per_s": 1.1e6 if "oldtower" in pair else 117e6}
                for entry, pair in zip(answer["links"], pairs, strict=True)
            ]
        return answer

    evidence = dialled(slow)
    ((node, problem),) = bandwidth.throughput(evidence)
    assert node == "oldtower" and problem.message.startswith("1.1 MB/s between it and laptop and tower")
    assert counts.count(1) == 4, "each of its pairs was measured again, alone"


@pytest.mark.parametrize(("rate", "pairs_left"), [(1.1e6, 4), (117e6, 2)])
def test_a_busy_minute_does_not_stay_in_the_figures(rate: float, pairs_left: int) -> None:
    """What is not measured again is not believed to be slower than what is: the queue of a slow wire is still
    full of others' bytes. Where the second look is good, nothing is known of the pairs that had none."""
    names = NAMES
    seen = replace(healthy.cpu(names=names), links=())
    meeting = cast(Any, SimpleNamespace(evidence=seen, names=names))
    good = {(a, b): cast(Any, None) for a in names for b in names if a != b}
    measured: dict[Any, Any] = {pair: {"throughput_bytes_per_s": 117e6} for pair in good}
    for number, pair in enumerate(pair for pair in sorted(good) if "laptop" in pair):
        measured[pair] = {"throughput_bytes_per_s": 2e4 * (number + 1)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_tests, "_SECOND_LOOKS", 2)
        patch.setattr(link_tests, "_measure", _again(rate))
        found = link_tests._second_look(meeting, {pair: _Link(pair) for pair in good}, measured)
    assert [entry["throughput_bytes_per_s"] for pair, entry in found.items() if "laptop" in pair] == [rate] * pairs_left


class _Link:
    def __init__(self, pair: tuple[str, str]) -> None:
        self.source, self.target = pair
        self.loss = None


def _again(rate: float) -> Any:
    def measure(meeting: Any, in_turn: dict[str, list[Any]], *, at_once: int) -> dict[Any, Any]:
        return {(source, link.target): {"throughput_bytes_per_s": rate} for source, entries in in_turn.items() for link in entries}

    return measure
