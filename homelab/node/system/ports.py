"""Interfaces, routes and ports of this node."""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import struct
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import processes
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.network_messages import Port

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.network_messages import FreePortRequest

_SIOCGIFCONF, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8912, 0x891B, 0x8921  # linux/sockios.h
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32
_FIRST_PORT, _PORTS = 29501, 500
_NETWORKS = "/sys/class/net"
# Bridges of containers and virtual machines, and tunnels: an address on the LAN only where cluster.toml names it.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "vnet", "vmnet", "vboxnet", "lxc", "lxd", "incus", "cni", "cali", "flannel", "podman", "dummy",
    "tailscale", "wg", "tun", "tap", "zt", "nebula", "ppp", "ipsec", "utun", "nordlynx", "proton",
)  # fmt: skip


def interfaces() -> list[JsonObject]:
    """All interfaces with their IPv4 addresses (types: `homelab.controller.facts.network.Interface`). By ioctl: `ip` need not be there."""
    entries = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        addresses = _addresses(probe)
        for _, name in socket.if_nameindex():
            mtu = _ioctl(probe, name, _SIOCGIFMTU)
            speed = files.text(f"{_NETWORKS}/{name}/speed")
            entries.append(
                {
                    "name": name,
                    "up": files.text(f"{_NETWORKS}/{name}/operstate") in ("up", "unknown"),
                    "addresses": addresses.get(name, []),
                    "kind": kind(name),
                    "mtu": struct.unpack("i", mtu[16:20])[0] if mtu else None,
                    "speed_mbit": int(speed) if speed.isdigit() else None,
                    **wake_up(name),
                }
            )
    return entries


def _addresses(probe: socket.socket) -> dict[str, list[str]]:
    """{interface: ["192.168.1.5/24", ...]}, the second address of an interface too."""
    room = array.array("B", bytes(_IFREQ_BYTES * 1024))
    place, _ = room.buffer_info()
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iP", len(room), place))
    except OSError:
        return {}
    addresses: dict[str, list[str]] = {}
    for start in range(0, struct.unpack("iP", answer)[0], _IFREQ_BYTES):
        entry = room[start : start + _IFREQ_BYTES].tobytes()
        label = entry[:16].split(b"\0")[0]
        try:
            # The question contains the address: an interface may have several, each with its own mask.
            mask = fcntl.ioctl(probe.fileno(), _SIOCGIFNETMASK, entry.ljust(256, b"\0"))[20:24]
        except OSError:
            mask = b"\xff" * 4
        prefix = bin(struct.unpack("!I", mask)[0]).count("1")
        name = label.decode("utf-8", "replace").split(":")[0]  # "eth0:1" is an address of eth0
        addresses.setdefault(name, []).append(f"{socket.inet_ntoa(entry[20:24])}/{prefix}")
    return addresses


def wake_up(name: str, networks: str = _NETWORKS) -> JsonObject:
    """The MAC address, and whether the card is set up to wake the machine (sysfs-devices-power: power/wakeup; `ethtool -s NAME wol g` sets it)."""
    mac = files.text(f"{networks}/{name}/address").lower()
    state = files.text(f"{networks}/{name}/device/power/wakeup")
    is_mac = re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", mac) is not None and mac != "00:00:00:00:00:00"
    return {"mac": mac if is_mac else None, "wakes": {"enabled": True, "disabled": False}.get(state)}


def kind(name: str, networks: str = _NETWORKS) -> str:
    """ "loopback", "wifi", "virtual" or "physical", as `homelab.controller.facts.network.Interface` has it; a bond, a VLAN or a bridge over a cable is physical."""
    if name == "lo":
        return "loopback"
    place = os.path.join(networks, name)
    if os.path.isdir(os.path.join(place, "wireless")) or os.path.exists(os.path.join(place, "phy80211")):
        return "wifi"
    try:
        members = os.listdir(os.path.join(place, "brif"))
    except OSError:  # no bridge
        is_virtual = name.startswith(_VIRTUAL) or os.path.exists(os.path.join(place, "tun_flags"))
        return "virtual" if is_virtual or "DEVTYPE=wireguard" in files.text(os.path.join(place, "uevent")) else "physical"
    # A router's br-lan has a name as Docker's bridges have it: what is in it says what it is.
    return "physical" if any(_is_over_a_device(member, networks) for member in members) else "virtual"


def _is_over_a_device(name: str, networks: str, depth: int = 4) -> bool:
    """Whether it is a device that one can touch, or stands on one: a bond and a VLAN name theirs by `lower_` links, and may stand on each other."""
    place = os.path.join(networks, name)
    if os.path.exists(os.path.join(place, "device")):
        return True
    try:
        below = [entry[len("lower_") :] for entry in os.listdir(place) if entry.startswith("lower_")]
    except OSError:
        return False
    return depth > 0 and any(_is_over_a_device(other, networks, depth - 1) for other in below)


def _ioctl(probe: socket.socket, name: str, request: int) -> bytes | None:
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def own_name_addresses() -> list[str]:
    """What this node's own name resolves to on itself (Debian and Ubuntu: often 127.0.1.1, which no peer can reach)."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)})
    except OSError:
        return []


def routes(peers: Iterable[str]) -> JsonObject:
    """{peer: {"interface", "source"}} as the kernel would route; connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        by_address = {own.split("/")[0]: name for name, all_own in _addresses(probe).items() for own in all_own}
    route_of = {}
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                source = probe.getsockname()[0]
        except OSError:
            continue
        # Any address of 127.0.0.0/8 is the loopback interface's, though only 127.0.0.1 is listed.
        interface = by_address.get(source) or ("lo" if source.startswith("127.") else None)
        if interface:
            route_of[peer] = {"interface": interface, "source": source}
    return route_of


def promised(workdir: str, node: str) -> dict[int, str]:
    """Port -> the live run whose newest attempt is to listen on it here, by its plan: torchrun needs some seconds until it does."""
    found = {}
    for run in processes.of_runs(workdir, node):
        folder = paths.run_dir(workdir, run)
        number = paths.newest_attempt(folder)
        plan = files.read_object(os.path.join(paths.attempt_dir(folder, number), layout.PLAN_JSON)) or {}
        name = paths.name_here(folder, number, node)
        has_ended = os.path.exists(os.path.join(paths.node_dir(folder, number, name), layout.EXIT_JSON))
        if plan.get("head") == name and isinstance(plan.get("master_port"), int) and not has_ended:
            found[plan["master_port"]] = run
    return found


def state(port: int, taken: Mapping[int, str] | None = None) -> JsonObject:
    """Whether the TCP port can be bound, and who holds it when not (types: `homelab.controller.facts.node.PortFacts`). `taken`: as `promised` says."""
    try:
        probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # a kernel that was started without IPv6
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with probe:
        # As torch's TCPStore does: TIME_WAIT leftovers are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            run = (taken or {}).get(port)
            return {"free": run is None, "holder": None, "holder_pid": None, "holder_run": run}
        except OSError:
            pass
    pid = _holder(port)
    if pid is None:
        return {"free": False, "holder": None, "holder_pid": None, "holder_run": None}
    return {"free": False, "holder": processes.command_line(pid)[:200], "holder_pid": pid, "holder_run": processes.run_of(pid)}


def answer_free_port(request: FreePortRequest) -> Port:
    """A free TCP port from "low" of the request on."""
    return Port(port=free_port(request.low, taken=promised(request.workdir, request.node)))


def free_port(low: int = _FIRST_PORT, high: int | None = None, taken: Mapping[int, str] | None = None) -> int:
    """A port that can be bound right now, for an attempt that must not meet the TIME_WAIT of the last one: the first of [low, high), or one of
    our own range where they end at 65535. OSError if none."""
    ports = range(low, min(low + _PORTS if high is None else high, 65536))
    own = range(_FIRST_PORT, _FIRST_PORT + _PORTS) if high is None and low + _PORTS > 65536 else range(0)
    every: list[int] = [*ports, *own]
    for port in every:
        if state(port, taken)["free"]:
            return port
    raise OSError(f"none of the {len(ports)} ports from {low} on is free")


def _holder(port: int) -> int | None:
    """pid of the process that listens on a port, as far as this user may look; None otherwise."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as stream:
                for line in list(stream)[1:]:
                    fields = line.split()
                    if int(fields[1].rsplit(":", 1)[1], 16) == port and fields[3] == "0A":
                        inodes.add(f"socket:[{fields[9]}]")
        except (OSError, IndexError, ValueError):
            continue
    for name in os.listdir("/proc") if inodes else []:
        if not name.isdigit():
            continue
        try:
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                if os.readlink(f"/proc/{name}/fd/{descriptor}") in inodes:
                    return int(name)
        except OSError:
            continue
    return None
