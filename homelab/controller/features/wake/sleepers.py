"""How a node can be woken, remembered while it is awake: a machine that sleeps does not tell its MAC address.

~/.local/state/homelab/wake.json (or below XDG_STATE_HOME); {"HOST:PORT": {"mac", "network", ...}}.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from homelab.controller.base.models import WireModel
from homelab.controller.config.cluster import Node
from homelab.controller.facts.base import Mac
from homelab.controller.facts.network import Interface
from homelab.controller.facts.node import Facts
from homelab.shared.protocol import files


class Sleeper(WireModel):
    """The network card by which a node is in the LAN. `wakes`: whether it is set up to wake the machine; None where the node does not say."""

    mac: Mac
    network: str
    interface: str
    kind: str
    wakes: bool | None = None


def of_facts(interfaces: tuple[Interface, ...], address: str, interface: str) -> Sleeper | None:
    """What to remember of a node whose place on the LAN is `address` on `interface`; None where that has no MAC address (loopback, tunnels)."""
    for entry in interfaces:
        network = next(
            (str(ipaddress.IPv4Interface(own).network) for own in entry.addresses if own.split("/")[0] == address and ":" not in own), None
        )
        if entry.name == interface and entry.mac and network:
            return Sleeper(mac=entry.mac, network=network, interface=interface, kind=entry.kind, wakes=entry.wakes)
    return None


def remember(nodes: tuple[Node, ...], facts: Mapping[str, Facts], lan: Mapping[str, tuple[str, str]]) -> None:
    """Keep what these nodes say of themselves. A file that cannot be written stays as it is: it only helps `homelab wake`."""
    before = _stored()
    now = dict(before)
    for node in nodes:
        if node.host != "local" and node.name in facts and node.name in lan:
            sleeper = of_facts(facts[node.name].network.interfaces, *lan[node.name])
            if sleeper is not None:
                now[_key(node)] = sleeper.model_dump()
    if now != before:
        with contextlib.suppress(OSError):
            path = _path()
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(path, now)


def recall(node: Node) -> Sleeper | None:
    """What is remembered of this node; None where it was never asked from here."""
    try:
        return Sleeper.model_validate(_stored()[_key(node)])
    except (KeyError, ValidationError):
        return None


def _key(node: Node) -> str:
    return f"{node.host}:{node.port}"


def _path() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "homelab" / "wake.json"


def _stored() -> files.JsonObject:
    return files.read_object(_path()) or {}
