"""Interfaces, routes and ports of this node."""

import fcntl
import os
import socket
import struct

from homelab.node import processes

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8915, 0x891B, 0x8921  # linux/sockios.h
_VIRTUAL = ("docker", "br-", "virbr", "veth", "tailscale", "wg", "tun", "tap", "cni", "flannel", "podman", "zt")


def interfaces():
    """All interfaces with their IPv4 addresses (types: `homelab.facts.Interface`). By ioctl: `ip` need not be there."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            address, mask = _ioctl_address(probe, name, _SIOCGIFADDR), _ioctl_address(probe, name, _SIOCGIFNETMASK)
            mtu = _ioctl(probe, name, _SIOCGIFMTU)
            addresses = []
            if address:
                prefix = bin(struct.unpack("!I", socket.inet_aton(mask or "255.255.255.255"))[0]).count("1")
                addresses.append("%s/%d" % (address, prefix))
            speed = _read("/sys/class/net/%s/speed" % name)
            found.append(
                {
                    "name": name,
                    "up": _read("/sys/class/net/%s/operstate" % name) in ("up", "unknown"),
                    "addresses": addresses,
                    "kind": _kind(name),
                    "mtu": struct.unpack("i", mtu[16:20])[0] if mtu else None,
                    "speed_mbit": int(speed) if speed and speed.isdigit() else None,
                }
            )
    return found


def _kind(name):
    if name == "lo":
        return "loopback"
    if os.path.isdir("/sys/class/net/%s/wireless" % name):
        return "wifi"
    return "virtual" if name.startswith(_VIRTUAL) else "physical"


def _ioctl(probe, name, request):
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def _ioctl_address(probe, name, request):
    answer = _ioctl(probe, name, request)
    return socket.inet_ntoa(answer[20:24]) if answer else None


def _read(path):
    try:
        with open(path) as stream:
            return stream.read().strip()
    except OSError:
        return None


def own_name_addresses():
    """What this node's own name resolves to on itself (Debian and Ubuntu: often 127.0.1.1, which no peer can reach)."""
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)})
    except OSError:
        return []


def routes(peers):
    """{peer: {"interface", "source"}} as the kernel would route; connecting a UDP socket sends nothing."""
    by_address = {entry["addresses"][0].split("/")[0]: entry["name"] for entry in interfaces() if entry["addresses"]}
    found = {}
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
            found[peer] = {"interface": interface, "source": source}
    return found


def state(port):
    """Whether the TCP port can be bound, and who holds it when not (types: `homelab.facts.PortFacts`)."""
    try:
        probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # a kernel that was started without IPv6
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with probe:
        # As torch's TCPStore does: TIME_WAIT leftovers are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return {"free": True, "holder": None, "holder_pid": None, "holder_run": None}
        except OSError:
            pass
    pid = _holder(port)
    run = None
    if pid:
        for entry in processes._environment(pid):
            if entry.startswith(b"HOMELAB_RUN="):
                run = entry[12:].decode("utf-8", "replace")
    return {
        "free": False,
        "holder": processes.command_line(pid)[:200] if pid else None,
        "holder_pid": pid,
        "holder_run": run,
    }


def free_port(low=29501, high=29999):
    """A port that can be bound right now, for an attempt that must not meet the TIME_WAIT of the last one. OSError if none."""
    for port in range(low, high):
        if state(port)["free"]:
            return port
    raise OSError("no free port between %d and %d" % (low, high))


def _holder(port):
    """pid of the process that listens on a port, as far as this user may look; None otherwise."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as stream:
                for line in list(stream)[1:]:
                    fields = line.split()
                    if int(fields[1].rsplit(":", 1)[1], 16) == port and fields[3] == "0A":
                        inodes.add("socket:[%s]" % fields[9])
        except (OSError, IndexError, ValueError):
            continue
    for name in os.listdir("/proc") if inodes else []:
        if not name.isdigit():
            continue
        try:
            for descriptor in os.listdir("/proc/%s/fd" % name):
                if os.readlink("/proc/%s/fd/%s" % (name, descriptor)) in inodes:
                    return int(name)
        except OSError:
            continue
    return None
