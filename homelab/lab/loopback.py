"""Nodes as sshd processes on 127.0.0.2, 127.0.0.3, ...: needs no root.

Each node has its own sshd, keys and home; network, host name, /tmp and process numbers are the machine's.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace

from homelab.controller.base.errors import HomelabError, InputError
from homelab.lab import cgroup, nodes, procfs, sshd
from homelab.lab.accounts import is_locked
from homelab.lab.lab_state import LabNode, LabState

FIRST_PORT = 2222
LAST_PORT = 2321


class Loopback:
    """The backend for machines without root."""

    def __init__(self) -> None:
        self.hierarchies = cgroup.find_hierarchies()

    def place(self, state: LabState) -> LabState:
        """One port that is free on all the nodes' addresses."""
        if state.rate is not None:
            raise InputError(
                "the loopback backend has no cables whose rate could be limited",
                where="--rate",
                hint="run as root with --backend namespaces",
            )
        if any(node.memory_bytes is not None for node in state.nodes):
            raise HomelabError(
                "the loopback backend has no memory limits",
                where="--memory",
                hint="run as root for --backend namespaces, or leave --memory out",
            )
        if any(node.cpu is not None for node in state.nodes) and self.hierarchies.cpu is None:
            raise InputError(
                "--cpu needs a cgroup tree with the cpu controller that this user may write, and there is none",
                where="--cpu",
                hint="run as root, or leave --cpu out",
            )
        hosts = [f"127.0.0.{node.number + 1}" for node in state.nodes]
        for port in range(FIRST_PORT, LAST_PORT + 1):
            if all(_is_free(host, port) for host in hosts):
                placed = (replace(n, host=h, port=port, interface="lo") for n, h in zip(state.nodes, hosts, strict=True))
                return replace(state, nodes=tuple(placed), network="127.0.0.0/8")
        raise HomelabError(
            f"no port from {FIRST_PORT} to {LAST_PORT} is free on {hosts[0]} to {hosts[-1]}",
            where="this machine",
            hint="end the programs that hold them: ss -ltnp",
        )

    def prepare(self, state: LabState) -> None:
        """Nothing is shared but the loopback device, which is there."""

    def configure(self, state: LabState, node: LabNode, client_key: str) -> str:
        """Keys and sshd_config; every session starts in the node's home through a wrapper."""
        folder = state.node_folder(node)
        environment = {**state.environment(node), "HOME": node.home, "PATH": f"{folder / 'bin'}:{sshd.SYSTEM_PATH}"}
        server = sshd.Server(
            listen=node.host,
            port=node.port,
            user=node.user,
            client_key=client_key,
            comment=f"homelab-lab-{state.id}-{node.name}",
            # HOME as well: without it the login shell would read the real home's start-up files first.
            environment=environment,
            wrapper=sshd.session_wrapper(folder, environment),
            # sshd without PAM refuses an account whose password is locked, even to a key.
            pam="yes" if is_locked(node.user) else "no",
        )
        return sshd.write_configuration(folder, server)

    def power_on(self, state: LabState, node: LabNode) -> None:
        """Start the node's first process, which starts sshd."""
        members: list[str] = []
        if self.hierarchies.cpu is not None:
            # Freezing goes by signal here, so that it works alike with and without root.
            own = nodes.group(state, node, cgroup.Hierarchies(self.hierarchies.cpu, None))
            limit = own.cpu_limit() if own.folders()[0].exists() else node.cpu
            own.create()
            own.limit_cpu(limit)
            members = own.member_files()
        spec = nodes.write_spec(state, node, isolated=False, cgroup_member_files=members, sshd=sshd.command(state.node_folder(node)))
        nodes.start(state, node, spec)

    def power_cut(self, state: LabState, node: LabNode) -> None:
        """SIGKILL all; the first process last: orphans that have cleared their environment are only found below it."""
        survivors = procfs.kill_until_gone(lambda: self.processes(state, node) - {nodes.init_of(state, node) or 0})
        survivors |= procfs.kill_until_gone(lambda: self.processes(state, node))
        if survivors:
            raise nodes.survived(state, node, survivors)

    def processes(self, state: LabState, node: LabNode) -> set[int]:
        """Those with the marker, the node's sshd (it writes its title over its environment), and all below them."""
        running = procfs.processes()
        configuration = str(sshd.configuration(state.node_folder(node)))
        roots = nodes.marked(state, node)
        roots |= {pid for pid in running if _is_sshd(procfs.command_line(pid), configuration)}
        return procfs.descendants(roots & running.keys(), running) - procfs.self_and_ancestors()

    def set_cable(self, state: LabState, node: LabNode) -> None:
        """There is none. Raises HomelabError."""
        raise HomelabError(
            "a loopback node has no cable of its own; only the namespaces backend can pull one",
            where=node.name,
            hint="start the lab as root with --backend namespaces",
        )

    def cable(self, state: LabState, node: LabNode) -> str:
        """Always plugged."""
        return "plugged"

    def freeze(self, state: LabState, node: LabNode) -> None:
        """SIGSTOP all, until none runs."""

        def stopped() -> bool:
            procfs.send(self.processes(state, node), signal.SIGSTOP)
            return self.is_frozen(state, node)

        if not procfs.until(stopped, 5.0):
            raise HomelabError("not every process of the node could be stopped within 5 s", where=node.name, hint="try again")

    def thaw(self, state: LabState, node: LabNode) -> None:
        """SIGCONT all."""
        procfs.send(self.processes(state, node), signal.SIGCONT)

    def is_frozen(self, state: LabState, node: LabNode) -> bool:
        """True when all are stopped by a signal."""
        alive = [process for pid in self.processes(state, node) if (process := procfs.read(pid))]
        return bool(alive) and all(process.state in ("T", "t") for process in alive)

    def remove(self, state: LabState) -> None:
        """End all nodes, then remove their cgroups."""
        for node in state.nodes:
            self.power_cut(state, node)
        procfs.kill_until_gone(lambda: nodes.marked(state))
        cgroup.remove(state.id, self.hierarchies)

    def leftovers(self, state: LabState) -> list[str]:
        """Processes and cgroups."""
        pids = nodes.marked(state).union(*(self.processes(state, node) for node in state.nodes))
        return nodes.describe(pids) + [f"cgroup {path}" for path in cgroup.leftovers(state.id, self.hierarchies)]


def _is_sshd(words: list[str], configuration: str) -> bool:
    # Its title is "sshd: /usr/sbin/sshd -D -e -f FILE [listener] ..."; anybody else who opens FILE is left in peace.
    return bool(words) and os.path.basename(words[0].split(":")[0]) == "sshd" and f"-f {configuration}" in " ".join(words)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As sshd does: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
