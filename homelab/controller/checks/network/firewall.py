"""The line that lets the LAN, and only the LAN, through a node's firewall, in or out."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from homelab.controller.base.hint import NO_COMMAND, Command, Hint
from homelab.controller.base.shell import quote_words
from homelab.controller.checks.evidence import Evidence
from homelab.controller.facts.node_commands import as_root


class Opening(NamedTuple):
    """`hint` for a person; `fix`, one shell line, where it is known which firewall the node has."""

    hint: str
    fix: Command


def opening(evidence: Evidence, name: str) -> Opening:
    """How to let in the LAN on all ports: NCCL and gloo listen on ephemeral ones. Only the line that fits, where that is known."""
    node = evidence.cluster.node(name)
    facts = evidence.facts[name]
    networks = lan_networks(evidence, name)
    ufw = as_root(node, facts, *(quote_words(["ufw", "allow", "from", network]) for network in networks))
    if facts.network.firewall == "ufw":
        return Opening(ufw, ufw)
    if facts.network.firewall == "firewalld":
        add = (quote_words(["firewall-cmd", "--permanent", f"--add-source={network}", "--zone=trusted"]) for network in networks)
        line = as_root(node, facts, *add, "firewall-cmd --reload")
        return Opening(line, line)
    if facts.network.firewall == "nftables" and facts.network.firewall_chains:
        line = as_root(node, facts, *_nft(facts.network.firewall_chains, "saddr", networks))
        return Opening(Hint("{} (until it restarts; to keep the rule, write it to /etc/nftables.conf, too)", line), line)
    if facts.network.firewall_seen:
        command = as_root(node, facts, "nft list ruleset")
        return Opening(
            f"{name} has no firewall that refuses incoming connections ({command}). Does a firewall on the other nodes refuse outgoing ones? Or does a router or "
            "a switch between them block them (client isolation)?",
            NO_COMMAND,
        )
    nft = as_root(node, facts, *_nft(("inet filter input",), "saddr", networks))
    return Opening(f"{ufw}; without ufw: {nft}", NO_COMMAND)


def stops_out(evidence: Evidence, name: str) -> bool:
    """Whether a firewall of this node is seen that can stop what leaves it."""
    facts = evidence.facts.get(name)
    return facts is not None and facts.network.firewall_out is not None


def letting_out(evidence: Evidence, name: str) -> Opening:
    """How to let out what goes to the LAN, as `opening` does for what comes in."""
    node = evidence.cluster.node(name)
    facts = evidence.facts[name]
    networks = lan_networks(evidence, name)
    ufw = as_root(node, facts, *(quote_words(["ufw", "allow", "out", "to", network]) for network in networks))
    if facts.network.firewall_out == "ufw":
        return Opening(ufw, ufw)
    if facts.network.firewall_out == "nftables" and facts.network.firewall_out_chains:
        line = as_root(node, facts, *_nft(facts.network.firewall_out_chains, "daddr", networks))
        return Opening(Hint("{} (until it restarts; to keep the rule, write it to /etc/nftables.conf, too)", line), line)
    rules = as_root(node, facts, "nft list ruleset")
    return Opening(f"does its firewall refuse outgoing connections? With ufw: {ufw}; without: {rules}", NO_COMMAND)


def _nft(chains: tuple[str, ...], side: str, networks: list[str]) -> list[str]:
    """A packet must pass every base chain of the hook: rules for each that can drop it."""
    return [
        quote_words(["nft", "insert", "rule", *chain.split(), "ip", side, network, "accept"]) for chain in chains for network in networks
    ]


def lan_networks(evidence: Evidence, name: str) -> list[str]:
    """The LAN as CIDR: the cluster's, or that of the node's own interface; and the addresses of the other nodes that are in neither.

    A tunnel's interface (Tailscale, WireGuard) has an address without neighbours: then it is the other nodes' addresses alone.
    """
    address, interface = evidence.lan[name]
    facts = evidence.facts.get(name)
    networks = [ipaddress.ip_network(evidence.cluster.network)] if evidence.cluster.network else []
    for entry in facts.network.interfaces if facts and not networks else ():
        if entry.name == interface:
            own = (ipaddress.ip_interface(text).network for text in entry.addresses if text.split("/")[0] == address and "/" in text)
            networks += [network for network in own if network.prefixlen < network.max_prefixlen - 1]
    others = [other for node, (other, _) in evidence.lan.items() if node != name]
    outside = [other for other in others if not any(ipaddress.ip_address(other) in network for network in networks)]
    return [*map(str, networks), *dict.fromkeys(outside)] or [address]
