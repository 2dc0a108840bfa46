"""Where machines are looked for: thin functions that ask this machine (its files, its kernel, its programs), the LAN's names and its addresses."""

from __future__ import annotations

import glob
import ipaddress
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from homelab.controller.base import own_machine, package
from homelab.controller.base.say import Say
from homelab.controller.features.discover import candidates
from homelab.controller.features.discover.candidates import Candidate

MOST_ADDRESSES = 256
_SCAN_S = 1.0  # a machine of the own LAN answers within milliseconds
_AT_ONCE = 64
Include = Callable[[str], Iterable[str]]
_MOST_DEPTH = 16  # OpenSSH's own (readconf.c, READCONF_MAX_DEPTH)
_LINE = re.compile(r"^\s*([A-Za-z]+)(?:\s+|\s*=\s*)(.*)$")
_TIMEOUT_S = 5.0
_MDNS_S = 1.5  # answers of a LAN come within some milliseconds; a machine that sleeps answers by its switch or not at all
_MDNS_ANSWER_MS = 1000  # all names are asked at once, so this is the limit of all of them
_MOST_NAMES = 64
_MDNS_SERVICE = "_ssh._tcp.local."


def search(say: Say, note: Say) -> list[Candidate]:
    """All candidates of all sources, the best source first. `note` hears which source could not be asked."""
    say("reading ~/.ssh/config")
    found = from_ssh_config(Path("~/.ssh").expanduser())
    say("asking the LAN for names (mDNS)")
    found += from_mdns(note)
    if shutil.which("tailscale"):
        found += candidates.from_tailscale(_output("tailscale", "status", "--json"))
    return found + (
        candidates.from_neighbours(_output("ip", "-j", "neigh")) if own_machine.is_linux() else candidates.from_arp(_output("arp", "-an"))
    )


def from_ssh_config(folder: Path) -> list[Candidate]:
    """The hosts that the `config` in this folder names, with the files that it includes."""

    def include(pattern: str) -> Iterable[str]:
        # Relative names are looked up beside the user's own file (ssh_config(5)).
        return [_text(file) for file in sorted(glob.glob(os.path.join(folder, os.path.expanduser(pattern))))]

    return [Candidate(name, candidates.SSH_CONFIG, name=name) for name in host_names(_text(folder / "config"), include)]


def from_mdns(note: Say) -> list[Candidate]:
    """The machines that announce SSH on the LAN; none where the package `zeroconf` is not installed."""
    try:
        import zeroconf
    except ImportError:
        note(f"mDNS was not used; to use it: {package.install('zeroconf')}")
        return []
    names: list[str] = []

    def add(zeroconf: zeroconf.Zeroconf, service_type: str, name: str, state_change: zeroconf.ServiceStateChange) -> None:
        if len(names) < _MOST_NAMES and name not in names and name.isprintable():  # anybody on the LAN may send any name
            names.append(name)

    def asked(name: str) -> Candidate | None:
        try:
            answer = network.get_service_info(_MDNS_SERVICE, name, timeout=_MDNS_ANSWER_MS)
        except (zeroconf.Error, UnicodeError, ValueError):
            return None
        addresses = answer.parsed_addresses(zeroconf.IPVersion.V4Only)[:1] if answer else []
        port = answer.port if answer and answer.port != 22 else None
        return Candidate(addresses[0], candidates.MDNS, name=name.removesuffix(f".{_MDNS_SERVICE}"), port=port) if addresses else None

    try:
        with zeroconf.Zeroconf(ip_version=zeroconf.IPVersion.V4Only) as network:
            browser = zeroconf.ServiceBrowser(network, _MDNS_SERVICE, handlers=[add])
            browser.join(_MDNS_S)
            seen = tuple(names)  # of a name that nobody answers for, the others do not wait
            with ThreadPoolExecutor(max_workers=len(seen) or 1) as pool:
                return [found for found in pool.map(asked, seen) if found is not None]
    except (OSError, zeroconf.Error) as error:
        note(f"mDNS was not used: {getattr(error, 'strerror', None) or error}")
    return []


def own_networks() -> list[str]:
    """The /24 around each own address, as text."""
    if own_machine.is_linux():
        return [str(network) for network in candidates.own_networks(_output("ip", "-j", "addr"))]
    addresses = {
        name: [one.address for one in ones if one.family == socket.AF_INET and one.ptp is None]
        for name, ones in psutil.net_if_addrs().items()
    }
    return [str(network) for network in candidates.networks_around(addresses)]


def own_host_keys(folder: Path = Path("/etc/ssh")) -> list[str]:
    """The public host keys of this machine's own SSH server: "ssh-ed25519 AAAA..."."""
    return [" ".join(text.split()[:2]) for file in sorted(folder.glob("ssh_host_*_key.pub")) if (text := _text(file))]


def has_nvidia_card() -> bool:
    """Whether this machine has a card that a driver runs."""
    return own_machine.is_linux() and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _output(*words: str) -> str:
    """What a program prints; "" where it is not there, fails or hangs."""
    program = shutil.which(words[0]) or shutil.which(words[0], path="/usr/sbin:/sbin")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *words[1:]], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(file: Path | str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def host_names(text: str, include: Include) -> list[str]:
    """Every literal word of the `Host` lines, in the order of the files, each once; patterns (`*`, `?`, `!`) are none.

    Include lines are followed wherever they stand, inside Host and Match blocks too.
    """
    return list(dict.fromkeys(_names(text, include, 0)))


def _names(text: str, include: Include, depth: int) -> Iterator[str]:
    for line in text.splitlines():
        found = _LINE.match(line)
        keyword = found[1].lower() if found else ""
        if keyword == "host" and found:
            yield from (word for word in _words(found[2]) if not set(word) & set("*?!"))
        elif keyword == "include" and found and depth < _MOST_DEPTH:
            for pattern in _words(found[2]):
                for inner in include(pattern):
                    yield from _names(inner, include, depth + 1)


def _words(text: str) -> list[str]:
    """The words of a line: quotes hold spaces together, and `#` begins a comment."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that does not end: ssh refuses the line, too
        return []


def listening(network: str, port: int = 22) -> list[str]:
    """The addresses of an IPv4 network (a /24 at most) that accept a connection on this port; nothing is sent. Raises ValueError for a larger network."""
    place = ipaddress.IPv4Network(network)
    if place.num_addresses > MOST_ADDRESSES:
        raise ValueError(f"{network} has more than {MOST_ADDRESSES} addresses")
    addresses = [str(address) for address in place.hosts()]

    def one(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=_SCAN_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="scan") as pool:
        return [address for address, is_open in zip(addresses, pool.map(one, addresses), strict=True) if is_open]
