"""A node behind NAT: it reaches the others, and none of them reaches it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts

_WSL_HINT = (
    "in Windows on that machine, write into %UserProfile%\\.wslconfig: [wsl2] networkingMode=mirrored (Windows 11 22H2 or newer), "
    "then in PowerShell: wsl --shutdown; and allow the LAN in the firewall of Windows, as administrator: "
    "Set-NetFirewallHyperVVMSetting -Name '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -DefaultInboundAction Allow"
)


@check(
    "network.nat",
    "no NAT stands between the node and the others (WSL2, port forwarding)",
    worst="fail",
    sees="network",
    after="network.place",
)
def judge(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail when no other node can connect to the node and a translated address explains it. Silent for a node that is reached."""
    if len(evidence.cluster.nodes) > 1:
        problem = explanation(evidence, node.name)
        if problem is not None:
            yield problem


def explanation(evidence: Evidence, name: str) -> Problem | None:
    """Why no other node reaches this one, when its address is translated on the way."""
    facts = evidence.facts.get(name)
    if facts is None or not _cannot_be_dialled(evidence, name):
        return None
    if facts.network.wsl is not None and facts.network.wsl != "mirrored":
        message = (
            f"it is a WSL2 whose network is {facts.network.wsl}: Windows hides it behind its own address, so no node can connect to it"
        )
        return Problem("fail", message, _WSL_HINT)
    host = evidence.cluster.node(name).host
    own = [address.split("/")[0] for entry in facts.network.interfaces for address in entry.addresses]
    if not own or not _is_ipv4(host) or host in own or host.startswith("127."):
        return None
    addresses = ", ".join(address for address in own if not address.startswith("127.")) or "only loopback"
    message = f"SSH reaches it at {host}, which none of its interfaces has (it has {addresses}): a port is forwarded to it, so no node can connect to it"
    hint = (
        "put it on the same network as the others: a bridged instead of a NAT adapter for a virtual machine, host networking "
        f"for a container, a cable to the same switch; then edit cluster.toml, node {name}: host and lan_address"
    )
    return Problem("fail", message, hint)


def _cannot_be_dialled(evidence: Evidence, name: str) -> bool:
    """No dial into it went well; a node without a place on the LAN was not dialled at all."""
    incoming = [link for link in evidence.links if link.target == name]
    return name not in evidence.lan or (bool(incoming) and all(link.error is not None for link in incoming))


def _is_ipv4(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False
