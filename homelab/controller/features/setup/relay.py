"""Copies between nodes: where this machine is the slow one, a file goes to one node, and the others fetch it from there over their LAN."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from homelab.controller.base import own_machine
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.features.setup.send import Target
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.controller.remote import answers
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.session import Stream
from homelab.shared.protocol.setup_messages import ShareRequest

_OPEN_S = 20.0


@contextlib.contextmanager
def sharing(agent: Agent, target: Target, parts: Sequence[NeededFile], say: Say) -> Iterator[dict[str, str]]:
    """{sha256: address} of these files, which the node serves to the others until the end of the block; nothing where it cannot."""
    of_model = {"model": target.model, "commit": target.commit} if target.model else {}
    files = {part.sha256: {"name": part.name, **of_model} for part in parts}
    try:
        stream = agent.open("setup-share", ShareRequest(address=agent.node.lan_address or "", files=files))
    except HomelabError as error:
        say(f"{agent.node.name} cannot share its files ({error.message}); this machine sends them")
        yield {}
        return
    try:
        addresses = _addresses(stream, files)
        if addresses:
            say(f"{agent.node.name} has everything now; the other nodes copy it from there")
        yield addresses
    finally:
        stream.close()


def _addresses(stream: Stream, files: dict[str, dict[str, str]]) -> dict[str, str]:
    with contextlib.suppress(ValueError, OSError):  # a time limit is an OSError, too
        answer = decoded(stream.readline(_OPEN_S))
        if answers.fault("setup-share", answer) is None:
            return {sha256: f"http://{answer['address']}:{answer['port']}/{answer['token']}/{sha256}" for sha256 in files}
    return {}


def is_on_wifi(host: str, interfaces: Path | None = None) -> bool:
    """Whether this machine reaches a host by Wi-Fi: the interface that has its own address there is a wireless one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # no packet is sent
            own = probe.getsockname()[0]
        wireless = _wireless(interfaces or Path("/sys/class/net")) if own_machine.is_linux() else _airports(_hardware_ports())
        return any(own == one.address for name, ones in psutil.net_if_addrs().items() if name in wireless for one in ones)
    except OSError:
        return False


def _wireless(interfaces: Path) -> list[str]:
    return [path.name for path in interfaces.iterdir() if (path / "wireless").is_dir() or (path / "phy80211").exists()]


def _hardware_ports() -> str:
    if own_machine.is_linux():
        return ""
    try:
        return subprocess.run(
            ["networksetup", "-listallhardwareports"], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _airports(text: str) -> list[str]:
    """Of macOS' `networksetup -listallhardwareports`: the interfaces that are Wi-Fi."""
    return re.findall(r"^Hardware Port: (?:Wi-Fi|AirPort)\nDevice: (\S+)", text, re.MULTILINE)
