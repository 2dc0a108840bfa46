"""Bytes between nodes: counted where they arrive, bounded in time, and a slow wire told from a busy one."""

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

from homelab.node import dials

pytestmark = pytest.mark.timeout(60)
REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.3"


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """The ports of a listening agent."""
    process = subprocess.Popen(
        [sys.executable, "-m", "homelab.node", "listen"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"address": ADDRESS, "port": None, "seconds": 30}) + "\n")
    process.stdin.flush()
    yield json.loads(process.stdout.readline())["ports"]
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def send(port: int, **more: Any) -> dict[str, Any]:
    request = {
        "targets": [{"node": "b", "address": ADDRESS, "port": port}],
        "send_bytes": 8 << 20,
        "send_s": 0.2,
        **more,
    }
    answer: dict[str, Any] = dials.dial(request)["links"][0]
    return answer


def test_bytes_are_counted(ports: list[int]) -> None:
    for port in ports:
        answer = send(port)
        assert answer["error"] is None and answer["throughput_bytes_per_s"] > 20e6
    assert (
        dials.dial({"targets": [{"node": "b", "address": ADDRESS, "port": ports[0]}]})["links"][0]["error"] is None
    ), "it still answers plain dials"


def test_several_at_once_wait_for_each_other(ports: list[int]) -> None:
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(send(ports[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4 and all(answer.get("throughput_bytes_per_s") for answer in answers), answers


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
    wire = SlowWire(ports[0], 2e6)
    started = time.monotonic()
    answer = send(wire.server.getsockname()[1])
    assert answer["error"] is None and 0.5e6 < answer["throughput_bytes_per_s"] < 2.5e6, answer
    assert time.monotonic() - started < 5, "8 MB at this rate would be 4 s, twice"
    wire.server.close()


def test_what_does_not_take_bytes_is_an_error() -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        assert send(port, timeout_s=0.3)["error"] == "it did not take bytes within 0 s"

        def other() -> None:
            connection, _ = server.accept()  # the first dial's, which has gone
            connection.close()
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-")
            connection.close()

        thread = threading.Thread(target=other)
        thread.start()
        assert send(port)["error"] == "something else answered on this port"
        thread.join(10)
    answer = send(port)
    assert "refused" in answer["error"] and "throughput_bytes_per_s" not in answer
