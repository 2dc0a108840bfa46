"""Interfaces, routes and ports of this node, and the dials between nodes that show a firewall before torchrun hangs on it."""

import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time

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


def listen(request):
    """Listen on the node's LAN address: on the given port where asked (`port`), and on two ephemeral ones.

    Prints one JSON line {"ports": [...], "rendezvous": port or null, "error"} when ready, then answers every connection
    with one byte until stdin closes or `seconds` have passed.
    """
    sockets, ports, rendezvous, error = [], [], None, None
    for port in [int(request["port"])] if request.get("port") else []:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((request["address"], port))
            listener.listen(64)
            sockets.append(listener)
            rendezvous = port
        except OSError as failure:
            error = failure.strerror
    for _ in range(2):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((request["address"], 0))
        except OSError as failure:
            error = failure.strerror
            continue
        listener.listen(64)
        sockets.append(listener)
        ports.append(listener.getsockname()[1])

    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.sendall(b"!")
                except OSError:
                    continue

    for listener in sockets:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    print(json.dumps({"ports": ports, "rendezvous": rendezvous, "error": error}), flush=True)
    ended = threading.Event()

    def wait_for_end():
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    ended.wait(float(request.get("seconds", 30)))


def dial(request):
    """Connect to every target at once. `targets`: [{"node", "address", "port"}]; answers latency_ms or error for each."""
    timeout_s = float(request.get("timeout_s", 2.0))
    answers = [dict(target) for target in request["targets"]]

    def one(answer):
        try:
            answer["error"] = connect(answer)
            # The fastest of three: a busy CPU on either side must not look like a slow wire.
            for _ in range(2):
                connect(answer)
        except socket.timeout:
            answer["error"] = "no answer within %.0f s (a firewall that drops packets looks like this)" % timeout_s
        except OSError as error:
            answer["error"] = error.strerror or str(error)

    def connect(answer):
        started = time.perf_counter()
        with socket.create_connection((answer["address"], int(answer["port"])), timeout=timeout_s) as connection:
            latency_ms = round((time.perf_counter() - started) * 1000, 3)
            answer["latency_ms"] = min(latency_ms, answer.get("latency_ms", latency_ms))
            connection.settimeout(timeout_s)
            return None if connection.recv(1) == b"!" else "something else answered on this port"

    threads = [threading.Thread(target=one, args=(answer,), daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * timeout_s + 1)
    return {"links": answers}
