"""A machine without power is switched on by the packet that goes onto the wire of the nodes. Its network namespace is gone: the switch listens for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.namespaces, pytest.mark.timeout(120)]

CARD = """
import socket, sys
card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
wanted = bytes.fromhex("ff" * 6 + sys.argv[1].replace(":", "") * 16)
print("listening", flush=True)
while wanted not in card.recv(2000):
    pass
"""


def test_a_node_that_was_asked_before_is_woken_by_its_card(desk: Desk, lab: Lab) -> None:
    assert desk.homelab("preflight", "--only", "clock", "--json").returncode == 0
    space = next(node["network_namespace"] for node in lab.status()["nodes"] if node["name"] == "node2")
    mac = subprocess.run(
        ["ip", "netns", "exec", space, "cat", "/sys/class/net/eth0/address"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lab.fault("node2", "power-cut")
    with subprocess.Popen([sys.executable, "-c", CARD, mac], stdout=subprocess.PIPE, text=True) as card:
        try:
            assert card.stdout and card.stdout.readline() == "listening\n"

            def switch_on() -> None:
                if card.wait() == 0:
                    lab.fault("node2", "power-on")

            threading.Thread(target=switch_on, daemon=True).start()
            answer = desk.homelab("wake", "--json")
        finally:
            card.kill()
    assert answer.returncode == 0, answer.stderr
    nodes = json.loads(answer.stdout)["nodes"]
    assert {name: entry["state"] for name, entry in nodes.items()} == {"node1": "awake", "node2": "woken", "node3": "awake"}
    assert nodes["node2"]["mac"] == mac
    assert "Next: homelab preflight" in desk.homelab("wake", "node2").stdout


def test_ctrl_c_ends_the_waiting(desk: Desk, lab: Lab) -> None:
    desk.homelab("preflight", "--only", "clock", "--json")
    lab.fault("node2", "power-cut")
    try:
        waiting = desk.spawn("wake")
        assert waiting.stdout is not None
        while "waiting for an answer" not in waiting.stdout.readline():
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=20) == 130
    finally:
        lab.fault("node2", "power-on")
