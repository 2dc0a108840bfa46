"""Where machines are looked for: thin functions that ask this machine (its files, its kernel, its programs) and the LAN's names."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from homelab.control import package
from homelab.discovery import candidates, ssh_config
from homelab.discovery.candidates import Candidate
from homelab.text import own_machine
from homelab.text.say import Say

_TIMEOUT_S = 5.0
_MDNS_S = 1.5  # answers of a LAN come within some milliseconds; a machine that sleeps answers by its switch or not at all
_MDNS_SERVICE = "_ssh._tcp.local."


def search(say: Say, note: Say) -> list[Candidate]:
    """All candidates of all sources, the best source first. `note` hears which source could not be asked."""
    say("reading ~/.ssh/config")
    found = from_ssh_config(Path("~/.ssh").expanduser())
    say("asking the LAN for names (mDNS)")
    found += from_mdns(note)
    if shutil.which("tailscale"):
        found += candidates.from_tailscale(_output("tailscale", "status", "--json"))
    return found + (candidates.from_neighbours(_output("ip", "-j", "neigh")) if own_machine.is_linux() else candidates.from_arp(_output("arp", "-an")))


def from_ssh_config(folder: Path) -> list[Candidate]:
    """The hosts that the `config` in this folder names, with the files that it includes."""

    def include(pattern: str) -> Iterable[str]:
        # Relative names are looked up beside the user's own file (ssh_config(5)).
        return [_text(file) for file in sorted(glob.glob(os.path.join(folder, os.path.expanduser(pattern))))]

    return [Candidate(name, candidates.SSH_CONFIG, name=name) for name in ssh_config.host_names(_text(folder / "config"), include)]


def from_mdns(note: Say) -> list[Candidate]:
    """The machines that announce SSH on the LAN; none where the package `zeroconf` is not installed."""
    try:
        import zeroconf
    except ImportError:
        note(f"mDNS was not asked; to ask it: {package.install('zeroconf')}")
        return []
    found: list[Candidate] = []

    def add(zeroconf: zeroconf.Zeroconf, service_type: str, name: str, state_change: zeroconf.ServiceStateChange) -> None:
        names.append(name)

    names: list[str] = []
    try:
        with zeroconf.Zeroconf(ip_version=zeroconf.IPVersion.V4Only) as network:
            browser = zeroconf.ServiceBrowser(network, _MDNS_SERVICE, handlers=[add])
            browser.join(_MDNS_S)
            for name in dict.fromkeys(names):
                answer = network.get_service_info(_MDNS_SERVICE, name, timeout=1000)
                for address in answer.parsed_addresses(zeroconf.IPVersion.V4Only)[:1] if answer else ():
                    port = answer.port if answer and answer.port != 22 else None
                    found.append(Candidate(address, candidates.MDNS, name=name.removesuffix(f".{_MDNS_SERVICE}"), port=port))
    except OSError as error:
        note(f"mDNS was not asked: {error.strerror or error}")
    return found


def own_networks() -> list[str]:
    """The /24 around each own address, as text."""
    if own_machine.is_linux():
        return [str(network) for network in candidates.own_networks(_output("ip", "-j", "addr"))]
    addresses = {name: [one.address for one in ones if one.family == socket.AF_INET and one.ptp is None] for name, ones in psutil.net_if_addrs().items()}
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
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(file: Path | str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
