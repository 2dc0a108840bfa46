"""Copies between nodes: where this machine is the slow one, a file goes to one node, and the others fetch it from there over their LAN."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from homelab.control.setup.send import Target
from homelab.errors import HomelabError
from homelab.provision.setup_plan import Part
from homelab.remote import answers
from homelab.remote.agent import Agent
from homelab.remote.decoding import decoded
from homelab.remote.session import Stream
from homelab.text.say import Say

_OPEN_S = 20.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACES = Path("/sys/class/net")


@contextlib.contextmanager
def sharing(agent: Agent, target: Target, parts: Sequence[Part], say: Say) -> Iterator[dict[str, str]]:
    """{sha256: address} of these files, which the node serves to the others until the end of the block; nothing where it cannot."""
    files = {part.sha256: {"name": part.name, **target.request} for part in parts}
    try:
        stream = agent.open("setup-share", {"address": agent.node.lan_address or "", "files": files})
    except HomelabError as error:
        say(f"{agent.node.name} cannot share what it has ({error.message}); this machine sends it")
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


def is_on_wifi(host: str, interfaces: Path = _INTERFACES) -> bool:
    """Whether this machine reaches a host by Wi-Fi: the interface that has its own address there is a wireless one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # no packet is sent
            own = probe.getsockname()[0]
            return any(_address(probe, path.name) == own for path in interfaces.iterdir() if (path / "wireless").is_dir() or (path / "phy80211").exists())
    except OSError:
        return False


def _address(probe: socket.socket, name: str) -> str:
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24])
    except OSError:
        return ""
