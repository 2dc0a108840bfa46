"""Which firewall is at work on this node, as far as this user may look."""

import os
import re
import shutil
import subprocess

_TABLE = re.compile(r"^table (\S+) (\S+) \{")
_CHAIN = re.compile(r"^\s*chain (\S+) \{")
_JUMP = re.compile(r"\b(?:jump|goto) (\S+)")
_DROPS = re.compile(r"\b(?:drop|reject)\b")


def look():
    """{"firewall": "ufw" | "firewalld" | "nftables" | None, "firewall_chains": [...]}; files first, programs only for root.

    "firewall_out" and "firewall_out_chains": the same of what leaves the node, None where nothing is seen that can stop it.
    "firewall_seen": the rules at work could be read, so what is not among them is not there.
    """
    ruleset = _ruleset() if os.geteuid() == 0 else None
    rules = _nftables_conf() if ruleset is None else ruleset
    out = parse_nft(rules, "output")
    seen = {"firewall_seen": ruleset is not None, "firewall_out": "nftables" if out else None, "firewall_out_chains": out}
    if _ufw_is_enabled():
        return dict(seen, firewall="ufw", firewall_chains=[], firewall_out="ufw" if out or _ufw_stops_out() else None, firewall_out_chains=[])
    if _is_alive("/run/firewalld.pid"):
        return dict(seen, firewall="firewalld", firewall_chains=[])
    chains = parse_nft(rules)
    return dict(seen, firewall="nftables" if chains else None, firewall_chains=chains)


def _ufw_is_enabled(path="/etc/ufw/ufw.conf"):
    try:
        with open(path) as stream:
            return any(line.replace(" ", "").strip().lower() == "enabled=yes" for line in stream)
    except OSError:
        return False


def _ufw_stops_out(path="/etc/default/ufw"):
    try:
        with open(path) as stream:
            text = stream.read()
    except OSError:
        return False
    return re.search(r'(?m)^DEFAULT_OUTPUT_POLICY="?(?:DROP|REJECT)', text) is not None


def _is_alive(pid_file):
    try:
        with open(pid_file) as stream:
            return os.path.isdir("/proc/%d" % int(stream.read()))
    except (OSError, ValueError):
        return False


def _ruleset():
    """The rules as `nft` prints them, for root where nft is installed; None otherwise."""
    program = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-n", "list", "ruleset"], capture_output=True, text=True, errors="replace", timeout=3
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _nftables_conf(etc="/etc"):
    """The rules that are loaded at start, for a login that may not ask for those at work; "" where none are loaded."""
    if not os.path.exists(os.path.join(etc, "systemd/system/sysinit.target.wants/nftables.service")):
        return ""
    try:
        with open(os.path.join(etc, "nftables.conf"), errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def parse_nft(text, hook="input"):
    """["inet filter input", ...] from `nft list ruleset` or nftables.conf: the chains of this hook that can drop a packet, by themselves or
    by a chain they jump to. An `accept` is needed in each of them."""
    rules, hooked, table, chain = {}, [], None, None
    for line in text.splitlines():
        if _TABLE.match(line):
            table = _TABLE.match(line).groups()
        elif _CHAIN.match(line):
            chain = table + (_CHAIN.match(line).group(1),)
            rules[chain] = []
        elif chain is not None and line.strip() == "}":
            chain = None
        elif chain is not None:
            rules[chain].append(re.sub(r'"[^"]*"', '""', line).split("#")[0])
            if re.search(r"\bhook %s\b" % hook, line):
                hooked.append(chain)
    # firewalld's own chain stops nothing that leaves but addresses of IPv6 that nobody has.
    hooked = [chain for chain in hooked if hook == "input" or chain[1] != "firewalld"]
    return [" ".join(chain) for chain in hooked if chain[0] in ("ip", "inet") and _can_drop(chain, rules, set())]


def _can_drop(chain, rules, seen):
    if chain in seen or chain not in rules:
        return False
    seen.add(chain)
    return any(
        _DROPS.search(line)
        or any(_can_drop(chain[:2] + (target.rstrip(";"),), rules, seen) for target in _JUMP.findall(line))
        for line in rules[chain]
    )
