"""The wire between isolated nodes: it carries, it is as fast as asked, and it can be cut without a goodbye."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.lab import Lab, network
from tests.lab.conftest import needs_namespaces, output, ssh, wait_until

pytestmark = [pytest.mark.timeout(90), pytest.mark.namespaces]

# Sends a number every 50 ms to whoever connects; the listener writes what it got, or how the connection ended.
SENDER = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5000)); print("listening", flush=True)
connection, _ = server.accept()
for number in range(100000):
    connection.sendall(b"%d\\n" % number); time.sleep(0.05)
"""
RECEIVER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=10); connection.settimeout(None)
while True:
    try: got = connection.recv(4096)
    except OSError as error: print("broken:", error, flush=True); break
    if not got: print("closed", flush=True); break
    print(got.decode().split()[-1], flush=True)
"""


def python(program: str, *arguments: str) -> str:
    """A shell command that runs a Python program."""
    return shlex.join([sys.executable, "-c", program, *arguments])


@contextmanager
def conversation(lab: Lab, folder: Path) -> Iterator[Path]:
    """node2 sends numbers to node1, detached from SSH; yields the file in which node1 writes them down."""
    file = folder / "received"
    sender = folder / "sender"
    output(lab, "node2", f"setsid {python(SENDER)} >{shlex.quote(str(sender))} 2>&1 </dev/null & exit 0")
    wait_until(lambda: sender.exists() and "listening" in sender.read_text())
    output(lab, "node1", f"setsid {python(RECEIVER, lab.nodes[1].host)} >{shlex.quote(str(file))} 2>&1 </dev/null & exit 0")
    wait_until(lambda: file.exists() and len(file.read_text().split()) > 3)
    yield file


def is_growing(file: Path, within_s: float) -> bool:
    """True when more arrives within `within_s`."""
    size = file.stat().st_size
    try:
        wait_until(lambda: file.stat().st_size > size, within_s)
    except AssertionError:
        return False
    return True


def lines(file: Path) -> list[str]:
    """What was received so far."""
    return file.read_text().split("\n")


def test_a_pulled_cable_is_silence_and_a_plugged_one_heals(isolated: Lab) -> None:
    folder = Path(isolated.nodes[0].home)
    with conversation(isolated, folder) as file:
        isolated.fault("node2", "pull-cable")
        wait_until(lambda: not is_growing(file, 0.3))
        assert not is_growing(file, 1.0)
        assert lines(file)[-2].isdigit()  # neither closed nor broken: nobody was told
        assert ssh(isolated, "node1", "ping -c1 -W1 " + isolated.nodes[1].host + " || cat /nonexistent").returncode != 0
        state = {node["name"]: (node["power"], node["cable"], node["ssh"]) for node in isolated.status()["nodes"]}
        assert state == {"node1": ("on", "plugged", True), "node2": ("on", "pulled", False)}
        isolated.fault("node2", "plug-cable")
        assert is_growing(file, 15.0)  # TCP sends again
        assert output(isolated, "node2", "echo back") == "back"
    isolated.fault("node2", "power-cut")
    isolated.fault("node2", "power-on")


def test_a_node_without_power_says_no_goodbye(isolated: Lab) -> None:
    with conversation(isolated, Path(isolated.nodes[0].home)) as file:
        isolated.fault("node2", "power-cut")
        wait_until(lambda: not is_growing(file, 0.3))
        assert not is_growing(file, 1.0)
        assert lines(file)[-2].isdigit()
        isolated.fault("node2", "power-on")
        assert output(isolated, "node2", "ls -A /tmp | grep -c sender; echo").strip() == "0"


def test_a_pulled_cable_stays_pulled_over_a_power_cycle(isolated: Lab) -> None:
    isolated.fault("node2", "pull-cable")
    isolated.fault("node2", "power-cut")
    isolated.fault("node2", "power-on")
    node = isolated.status()["nodes"][1]
    assert (node["power"], node["cable"], node["ssh"]) == ("on", "pulled", False)
    isolated.fault("node2", "plug-cable")
    wait_until(lambda: isolated.status()["nodes"][1]["ssh"])


@needs_namespaces
def test_rate_and_cpu_are_as_asked(tmp_path: Path) -> None:
    with Lab.up(tmp_path / "lab", names=["tower", "mini"], backend="namespaces", cpu=[0.9, 0.5], rate="80mbit") as lab:
        assert [node["cpu_cores"] for node in lab.status()["nodes"]] == [pytest.approx(0.9), pytest.approx(0.5)]
        assert "speed = 0.9" in lab.cluster_file.read_text()
        receive = "import socket,time\nc,_=socket.create_server(('',5000)).accept()\nwhile c.recv(1<<20): pass\nprint(time.monotonic())"
        send = (
            "import socket,sys,time\nfor _ in range(200):\n  try: c=socket.create_connection((sys.argv[1],5000)); break\n"
            "  except OSError: time.sleep(0.05)\nprint(time.monotonic())\nc.sendall(bytes(20_000_000))"
        )

        def megabytes_per_s() -> float:
            """From the first byte that is sent to the last that arrives: both read this machine's one clock, so buffers add nothing."""
            receiver = subprocess.Popen(
                [*lab.ssh_command("mini"), python(receive)], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
            )
            began = float(output(lab, "tower", python(send, lab.nodes[1].host)))
            return 20 / (float(receiver.communicate(timeout=30)[0]) - began)

        seen = [megabytes_per_s()]
        while seen[-1] <= 5 and len(seen) < 3:  # a busy machine is slower, and never quicker
            seen.append(megabytes_per_s())
        assert 5 < seen[-1] < 11, seen  # 80 Mbit/s are 10 MB/s


@needs_namespaces
def test_two_labs_take_different_networks(isolated: Lab, tmp_path: Path) -> None:
    with Lab.up(tmp_path / "second", nodes=1, backend="namespaces") as second:
        assert second.state.network != isolated.state.network
        assert output(second, "node1", "hostname") == "node1"
        assert output(isolated, "node1", "hostname") == "node1"


@pytest.mark.parametrize("rate", ["1", "fast", "0mbit", "1gbit; reboot", "-1mbit", ""])
def test_impossible_rates_are_refused(rate: str) -> None:
    with pytest.raises(InputError):
        network.rate_bits_per_s(rate)


def test_rates_are_bits_per_second() -> None:
    assert [network.rate_bits_per_s(rate) for rate in ("1gbit", "2.5gbit", "100mbit", "56kbit")] == [1e9, 2.5e9, 1e8, 56e3]
