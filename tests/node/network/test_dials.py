"""The dials between nodes: connects, packets of full size, and bytes, which are counted where they arrive."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.remote import answers
from homelab.node.network import connectivity, path_mtu, throughput
from homelab.node.network.listener import PROBE, Listener
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.network_messages import Dial, Dials

pytestmark = pytest.mark.timeout(60)
REPOSITORY = Path(__file__).resolve().parents[3]
ADDRESS = "127.0.0.3"


class Meeting:
    """The agent of one node."""

    def __init__(self, **request: Any) -> None:
        command = [sys.executable, "-m", "homelab.node", "meet"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        self.ready = self.ask({"address": ADDRESS, "port": None, "seconds": 30, **request})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """A line in, a line out."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> int:
        """Close its stdin."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait(10)
        self.process.stdout.close()
        return code


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A listening agent, which ends with its input."""
    started = Meeting()
    yield started
    assert started.end() == 0


@pytest.fixture
def ports() -> list[int]:
    """The ports of a listener in this process, which ends with it."""
    return Listener(ADDRESS).ports


def dialled(port: int, often: int = 1, timeout_s: float = 2.0) -> Dial:
    """One port of one node."""
    (answer,) = connectivity.dial([{"node": "b", "address": ADDRESS, "ports": {str(port): often}}], timeout_s)
    assert answers.fault("meet", as_json(Dials(links=(answer,)))) is None
    return answer


def nothing(node: str) -> Dial:
    """A link of which nothing is measured."""
    return Dial(node=node, address=ADDRESS, port=1)


def send(port: int, limit_bytes: int = 8 << 20, limit_s: float = 0.2) -> Dial:
    """Bytes to one port of one node."""
    (answer,) = throughput.send_all([{"node": "b", "address": ADDRESS, "port": port}], limit_bytes, limit_s)
    assert answers.fault("meet", as_json(Dials(links=(answer,)))) is None
    return answer


def test_one_process_listens_dials_and_sends(meeting: Meeting) -> None:
    other = Meeting()
    there = other.ready
    assert len(there["ports"]) == 8 and there["error"] is None and there["rendezvous"] is None
    ports = {str(there["ports"][0]): 5, str(there["ports"][1]): 1, "1": 1}
    target = {"node": "b", "address": ADDRESS, "ports": ports, "udp": there["udp"], "packet_bytes": 1500}
    links = meeting.ask({"dial": [target], "timeout_s": 2.0})["links"]
    assert [link["error"] for link in links] == [None, None, "Connection refused"]
    assert 0 <= links[0]["latency_ms"] <= links[0]["median_ms"] <= links[0]["worst_ms"]
    assert links[0]["carried_bytes"] == 1500 and links[0]["lost_bytes"] is None
    sent = meeting.ask({"send": [{"node": "b", "address": ADDRESS, "port": there["ports"][1]}], "bytes": 8 << 20, "seconds": 0.2})
    assert sent["links"][0]["error"] is None and sent["links"][0]["throughput_bytes_per_s"] > 0
    assert other.end() == 0


def test_a_port_is_dialled_as_often_as_asked(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.3, 40.0, 0.2, 0.4, 0.5])
    monkeypatch.setattr(connectivity, "_latency_ms", lambda connection, started: next(taken))
    answer = dialled(ports[0], often=5)
    assert (answer.latency_ms, answer.median_ms, answer.worst_ms) == (0.2, 0.4, 40.0)


def test_the_rendezvous_port_is_listened_on_where_it_is_free(meeting: Meeting) -> None:
    taken = meeting.ready["ports"][0]
    other = Meeting(port=taken)
    assert other.ready["rendezvous"] is None and other.ready["error"] == "Address already in use" and len(other.ready["ports"]) == 8
    assert other.end() == 0
    with socket.create_server((ADDRESS, 0)) as probe:
        free = probe.getsockname()[1]
    here = Listener(ADDRESS, free)
    assert here.rendezvous == free and dialled(free).error is None


def test_the_agent_ends_by_itself_when_its_time_is_over() -> None:
    other = Meeting(seconds=0.2)
    assert other.process.wait(10) == 0
    other.end()


def test_what_does_not_answer_is_told_from_what_answers_something_else() -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]

        def greet() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert dialled(port).error == "another program answered on this port"
        thread.join(10)
    assert dialled(port).error == "Connection refused"


def test_a_port_that_drops_is_given_up_in_time() -> None:
    with socket.socket() as server:
        server.bind((ADDRESS, 0))
        server.listen(0)
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # a full queue drops what comes, as a firewall does
            filler.setblocking(False)
            filler.connect_ex((ADDRESS, port))
        started = time.monotonic()
        answer = dialled(port, timeout_s=0.5)
        assert "a firewall that drops packets looks like this" in str(answer.error)
        assert 0.4 < time.monotonic() - started < 20, "a kernel gives up after two minutes"
        for filler in fillers:
            filler.close()


def test_packets_that_vanish_by_their_size() -> None:
    """A relay that passes on probes up to 1400 bytes, as a tunnel does that says nothing."""
    targets = [
        {"node": "b", "address": ADDRESS, "udp": echo_up_to(1400), "packet_bytes": 1500},
        {"node": "c", "address": ADDRESS, "udp": echo_up_to(9000), "packet_bytes": 1500},
    ]
    links = [nothing("b"), nothing("b"), nothing("c")]
    path_mtu.probe(targets, links)
    assert links == [nothing("b").replace(carried_bytes=1400, lost_bytes=1500), nothing("b"), nothing("c").replace(carried_bytes=1500)]


def test_where_udp_is_blocked_nothing_is_known() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((ADDRESS, 0))
        links = [nothing("b")]
        path_mtu.probe([{"node": "b", "address": ADDRESS, "udp": silent.getsockname()[1], "packet_bytes": 1500}], links)
        assert links == [nothing("b")]
    path_mtu.probe([{"node": "b", "address": ADDRESS, "udp": None, "packet_bytes": 1500}], links)
    path_mtu.probe([{"node": "b", "address": ADDRESS, "udp": 1, "packet_bytes": 65536}], links)
    assert links == [nothing("b")], "the loopback device has no wire"


def echo_up_to(limit_bytes: int) -> int:
    """The UDP port of an echo that never sees larger packets."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind((ADDRESS, 0))

    def serve() -> None:
        while True:
            data, sender = echo.recvfrom(1 << 16)
            if len(data) + 28 <= limit_bytes:
                echo.sendto(data[: PROBE.size], sender)

    threading.Thread(target=serve, daemon=True).start()
    return int(echo.getsockname()[1])


def test_several_senders_wait_for_each_other(ports: list[int]) -> None:
    found: list[Dial] = []
    threads = [threading.Thread(target=lambda: found.append(send(ports[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4 and all(answer.throughput_bytes_per_s for answer in found), found
    assert dialled(ports[0]).error is None, "it still answers plain dials"


class SlowWire:
    """A relay that passes on `rate` bytes per second to the agent, and what comes back at once."""

    def __init__(self, port: int, rate: float) -> None:
        self.rate, self.port = rate, port
        self.server = socket.create_server((ADDRESS, 0))
        self.server.settimeout(20)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                here, _ = self.server.accept()
            except OSError:
                return
            here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            there = socket.create_connection((ADDRESS, self.port))
            threading.Thread(target=self._pass, args=(here, there, self.rate), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, None), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, rate: float | None) -> None:
        try:
            while block := source.recv(1 << 14):
                target.sendall(block)
                if rate is not None:
                    time.sleep(len(block) / rate)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()


def test_a_slow_wire_is_measured_as_slow_and_not_for_long(ports: list[int]) -> None:
    wire_ = SlowWire(ports[0], 2e6)
    started = time.monotonic()
    answer = send(wire_.server.getsockname()[1], 80 << 20)
    # On a busy machine the relay is slower, and never quicker.
    assert answer.error is None and answer.throughput_bytes_per_s is not None and 0 < answer.throughput_bytes_per_s < 4e6, answer
    assert time.monotonic() - started < 20, "80 MB at this rate would be 40 s"
    wire_.server.close()


def test_bytes_that_never_arrive_are_a_stall_and_not_nothing(ports: list[int]) -> None:
    """Small packets pass, and a gradient does not: the relay swallows everything after the question."""
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]

        def swallow() -> None:
            while True:
                try:
                    here, _ = server.accept()
                except OSError:
                    return
                there = socket.create_connection((ADDRESS, ports[0]))
                here.sendall(there.recv(1))
                there.sendall(here.recv(200))
                here.sendall(there.recv(1))
                here.sendall(there.recv(500))
                here.close()
                there.close()

        threading.Thread(target=swallow, daemon=True).start()
        started = time.monotonic()
        answer = send(port)
        assert answer.stalled == "bytes that are sent do not arrive" and answer.throughput_bytes_per_s is None
        assert time.monotonic() - started < 20
    refused = send(port)
    assert refused.stalled == "Connection refused"


def test_stalls_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(throughput, "_STALLED_S", 0.7)
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        targets = [{"node": str(number), "address": ADDRESS, "port": port} for number in range(60)]
        started = time.monotonic()
        found = throughput.send_all(targets, 1 << 20, 0.1)
        assert time.monotonic() - started < 8, "sixty targets that are each asked twice, for 0.2 s, would be 24 s"
        assert found[0].stalled and not any(entry.throughput_bytes_per_s for entry in found)
        assert found[-1].stalled is None, "no time was left to find out"
