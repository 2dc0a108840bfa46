"""Which firewall is at work on this node, as far as this user may look."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from homelab.node.system import programs
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_TABLE = re.compile(r"^table (\S+) (\S+) \{")
_FIREWALLD = re.compile(r"^table \S+ firewalld \{", re.MULTILINE)
_CHAIN = re.compile(r"^\s*chain (\S+) \{")
_JUMP = re.compile(r"\b(?:jump|goto) (\S+)")
_DROPS = re.compile(r"\b(?:drop|reject)\b")


def look() -> JsonObject:
    """{"firewall": "ufw" | "firewalld" | "nftables" | None, "firewall_chains": [...]}; files first, programs only for root.

    "firewall_out" and "firewall_out_chains": the same of what leaves the node, None where nothing is seen that can stop it.
    "firewall_seen": the rules at work could be read, so what is not among them is not there.
    """
    ruleset = _ruleset() if os.geteuid() == 0 else None
    rules = _nftables_conf() if ruleset is None else ruleset
    out = parse_nft(rules, "output")
    facts = {"firewall_seen": ruleset is not None, "firewall_out": "nftables" if out else None, "firewall_out_chains": out}
    if _ufw_is_enabled():
        return dict(
            facts, firewall="ufw", firewall_chains=[], firewall_out="ufw" if out or _ufw_stops_out() else None, firewall_out_chains=[]
        )
    if _FIREWALLD.search(rules) or _runs_firewalld():
        return dict(facts, firewall="firewalld", firewall_chains=[])
    chains = parse_nft(rules)
    return dict(facts, firewall="nftables" if chains else None, firewall_chains=chains)


def _ufw_is_enabled(path: str = "/etc/ufw/ufw.conf") -> bool:
    return any(line.replace(" ", "").strip().lower() == "enabled=yes" for line in files.text(path).splitlines())


def _ufw_stops_out(path: str = "/etc/default/ufw") -> bool:
    return re.search(r'(?m)^DEFAULT_OUTPUT_POLICY="?(?:DROP|REJECT)', files.text(path)) is not None


def _runs_firewalld(processes: str = "/proc") -> bool:
    """By its name: Fedora and RHEL start it with --nopid, so no file names its process."""
    names = [name for name in os.listdir(processes) if name.isdigit()]
    return any(files.text(f"{processes}/{name}/comm") == "firewalld" for name in names)


def _ruleset() -> str | None:
    """The rules as `nft` prints them, for root where nft is installed; None otherwise."""
    program = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        return None
    try:
        code, output, _ = programs.answer_of((program, "-n", "list", "ruleset"), 3)
    except (OSError, TimeoutError):
        return None
    return output if code == 0 else None


def _nftables_conf(etc: str = "/etc") -> str:
    """The rules that are loaded at start, for a login that may not ask for those at work; "" where none are loaded."""
    if not os.path.exists(os.path.join(etc, "systemd/system/sysinit.target.wants/nftables.service")):
        return ""
    return files.text(os.path.join(etc, "nftables.conf"))


def parse_nft(text: str, hook: str = "input") -> list[str]:
    """["inet filter input", ...] from `nft list ruleset` or nftables.conf: the chains of this hook that can drop a packet, by themselves or
    by a chain they jump to. An `accept` is needed in each of them."""
    rules: dict[tuple[str, ...], list[str]] = {}
    hooked: list[tuple[str, ...]] = []
    table: tuple[str, ...] = ()
    chain: tuple[str, ...] | None = None
    for line in text.splitlines():
        opened, begun = _TABLE.match(line), _CHAIN.match(line)
        if opened:
            table = opened.groups()
        elif begun:
            chain = (*table, begun[1])
            rules[chain] = []
        elif chain is not None and line.strip() == "}":
            chain = None
        elif chain is not None:
            rules[chain].append(re.sub(r'"[^"]*"', '""', line).split("#")[0])
            if re.search(rf"\bhook {hook}\b", line):
                hooked.append(chain)
    # firewalld's own output chain stops only IPv6 addresses that no node has.
    hooked = [chain for chain in hooked if hook == "input" or chain[1] != "firewalld"]
    return [" ".join(chain) for chain in hooked if chain[0] in ("ip", "inet") and _can_drop(chain, rules, set())]


def _can_drop(chain: Any, rules: Any, visited: Any) -> bool:
    if chain in visited or chain not in rules:
        return False
    visited.add(chain)
    return any(
        _DROPS.search(line) or any(_can_drop(chain[:2] + (target.rstrip(";"),), rules, visited) for target in _JUMP.findall(line))
        for line in rules[chain]
    )
