"""Nodes as real as one machine can hold: each with its own network, host name, process numbers, mounts and CPU limit.

Needs root. A node's own: address and cable, host name, boot id, the files of /etc (not its folders), home of root, /tmp, /dev/shm, /proc,
sshd. All else of the file system is the machine's: the same Python, the same model folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import uuid
from dataclasses import replace
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import cgroup, network, nodes, procfs, sshd
from homelab.lab.accounts import passwd_with_account, passwd_with_home, shadow_of
from homelab.lab.lab_state import LabNode, LabState
from homelab.lab.tools import call, machine_lock, program, require

PROGRAMS = ("sshd", "ssh-keygen", "ip", "tc", "unshare", "nsenter", "setsid")
_OWN = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")  # namespaces of a node, beside that of its network

# What lies below these is invisible to a node unless it is shared on purpose.
PRIVATE_FOLDERS = ("/tmp/", "/dev/shm/")


def check_machine(hierarchies: cgroup.Hierarchies, *, is_limited: bool) -> None:
    """Raise HomelabError where this machine cannot hold such nodes: without root, a program, namespaces or cgroups. `is_limited`: with a CPU limit."""
    if os.geteuid() != 0:
        raise HomelabError(
            "the namespaces backend needs root",
            where="--backend namespaces",
            hint=Hint("sudo {} ..., or --backend loopback, which needs no root", homelab("lab up")),
        )
    require(*PROGRAMS)
    if hierarchies.freezer is None or (hierarchies.cpu is None and is_limited):
        raise HomelabError(
            "this machine has no cgroup tree that root may write (a container, perhaps)",
            where="/sys/fs/cgroup",
            hint="start the container with --privileged, or use --backend loopback without --cpu",
        )
    try:
        call("unshare", "--net", *_OWN, "--mount-proc", "true")
    except HomelabError as error:
        raise HomelabError(
            f"this machine lets root make no namespaces (a container, perhaps): {error.message}",
            where="this machine",
            hint="start the container with --privileged, or use --backend loopback without --cpu",
        ) from None


class Namespaces:
    """The backend for root."""

    def __init__(self) -> None:
        self.hierarchies = cgroup.find_hierarchies()

    def place(self, state: LabState) -> LabState:
        """A free network; the nodes get .11, .12, ... of it. Raises HomelabError where this machine cannot hold them."""
        check_machine(self.hierarchies, is_limited=any(node.cpu is not None for node in state.nodes))
        if state.rate is not None:
            network.rate_bits_per_s(state.rate)
        net = network.free_network()
        placed = (
            replace(
                node,
                host=network.address(net, node.number),
                port=node.port or 22,
                interface=network.INTERFACE,
                network_namespace=network.namespace(state.id, node.name),
            )
            for node in state.nodes
        )
        return replace(state, nodes=tuple(placed), network=net)

    def prepare(self, state: LabState) -> None:
        """The bridge and the controller's way to it."""
        network.create_switch(state)

    def configure(self, state: LabState, node: LabNode, client_key: str) -> str:
        """Keys, sshd_config and the node's files of /etc."""
        folder = state.node_folder(node)
        for name in ("etc", "etc-view", "tmp", "sys"):
            (folder / name).mkdir(exist_ok=True)
        passwd = Path("/etc/passwd").read_text(errors="surrogateescape")
        passwd = (
            passwd_with_home(passwd, node.user, node.home)
            if node.uid is None
            else passwd_with_account(passwd, node.user, node.uid, node.home)
        )
        files = {
            "passwd": passwd,
            "shadow": shadow_of(passwd),
            "hostname": f"{node.name}\n",
            # A well-kept machine, which knows its neighbours. (Debian writes 127.0.1.1 here, which preflight warns of.)
            "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
            + "".join(f"{peer.host}\t{peer.name}\n" for peer in state.nodes),
        }
        for name, text in files.items():
            (folder / "etc" / name).write_text(text, errors="surrogateescape")
        (folder / "etc" / "shadow").chmod(0o600)
        server = sshd.Server(
            listen="0.0.0.0",
            port=node.port,
            user=node.user,
            client_key=client_key,
            comment=f"homelab-lab-{state.id}-{node.name}",
            environment={**state.environment(node), "PATH": f"{folder / 'bin'}:{sshd.SYSTEM_PATH}"},
            wrapper=None,
            pam="no",
        )
        host_key = sshd.write_configuration(folder, server)
        if node.uid is not None:
            os.chown(folder / "authorized_keys", node.uid, node.uid)  # sshd reads it as that user
        return host_key

    def power_on(self, state: LabState, node: LabNode) -> None:
        """Wire the node and start its PID 1. The CPU limit is the one it had, its /tmp is empty."""
        folder = state.node_folder(node)
        own = nodes.group(state, node, self.hierarchies)
        limit = own.cpu_limit() if own.folders()[0].exists() else node.cpu
        own.create()
        if self.hierarchies.cpu is not None:
            own.limit_cpu(limit)
        if node.memory_bytes is not None:
            own.limit_memory(node.memory_bytes)
        shutil.rmtree(folder / "tmp")
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        network.connect(state, node)
        # All namespaces share the kernel's; a machine that was switched on anew has another one.
        (folder / "etc" / "boot_id").write_text(f"{uuid.uuid4()}\n")
        binds = [[str(folder / "etc" / name), f"/etc/{name}"] for name in ("passwd", "shadow", "hostname", "hosts")]
        binds.append([str(folder / "etc" / "boot_id"), "/proc/sys/kernel/random/boot_id"])
        spec = nodes.write_spec(
            state,
            node,
            isolated=True,
            hostname=node.name,
            folder=str(folder),
            binds=[[source, target] for source, target in binds if os.path.exists(target)] + [[str(folder / "tmp"), "/tmp"]],
            shared=[path for path in (*state.shared, state.folder) if path.startswith(PRIVATE_FOLDERS)],
            cgroup_member_files=own.member_files(),
            sshd=sshd.command(folder),
        )
        enter = (program("nsenter"), f"--net={network.NAMESPACES / node.network_namespace}")
        nodes.start(state, node, spec, prefix=(*enter, program("unshare"), *_OWN))

    def power_cut(self, state: LabState, node: LabNode) -> None:
        """First the wire is dead, then the node: its connections are not closed, they fall silent."""
        network.silence(state, node)
        own = nodes.group(state, node, self.hierarchies)

        def dead() -> bool:
            pids = self.processes(state, node) | nodes.marked(state, node)
            first = nodes.init_of(state, node)
            procfs.send([first] if first else pids, signal.SIGKILL)
            with contextlib.suppress(OSError):
                own.thaw()  # a frozen process cannot die
            return not pids

        if not procfs.until(dead, 10.0):
            raise nodes.survived(state, node, self.processes(state, node))
        network.disconnect(state, node)

    def processes(self, state: LabState, node: LabNode) -> set[int]:
        """All of the node's PID namespace, and of namespaces below it."""
        first = nodes.init_of(state, node)
        if first is None:
            return set()
        running = procfs.processes()
        own = procfs.pid_namespace(first)
        return {pid for pid in running if procfs.pid_namespace(pid) == own} | procfs.descendants([first], running)

    def set_cable(self, state: LabState, node: LabNode) -> None:
        """Pull or plug the node's cable at the switch."""
        if node.power == "on":
            network.set_cable(state, node)

    def cable(self, state: LabState, node: LabNode) -> str:
        """As the switch sees it; for a node without power, as it will be."""
        plugged = network.is_plugged(state, node)
        return node.cable if plugged is None else "plugged" if plugged else "pulled"

    def freeze(self, state: LabState, node: LabNode) -> None:
        """By the cgroup freezer."""
        nodes.group(state, node, self.hierarchies).freeze()

    def thaw(self, state: LabState, node: LabNode) -> None:
        """By the cgroup freezer."""
        nodes.group(state, node, self.hierarchies).thaw()

    def is_frozen(self, state: LabState, node: LabNode) -> bool:
        """As the freezer says."""
        return nodes.group(state, node, self.hierarchies).is_frozen()

    def remove(self, state: LabState) -> None:
        """End all nodes at once, then remove network and cgroups."""
        for node in state.nodes:
            network.silence(state, node)

        def dead() -> bool:
            pids = nodes.marked(state).union(*(self.processes(state, node) for node in state.nodes))
            procfs.send(pids, signal.SIGKILL)
            for node in state.nodes:
                with contextlib.suppress(OSError):
                    nodes.group(state, node, self.hierarchies).thaw()
            return not pids

        procfs.until(dead, 10.0)
        cgroup.remove(state.id, self.hierarchies)
        with machine_lock():
            network.remove(state)

    def leftovers(self, state: LabState) -> list[str]:
        """Processes, cgroups, namespaces, interfaces, mounts and routes."""
        pids = nodes.marked(state).union(*(self.processes(state, node) for node in state.nodes))
        leftovers = nodes.describe(pids)
        leftovers += [f"cgroup {path}" for path in cgroup.leftovers(state.id, self.hierarchies)]
        leftovers += [f"namespace {name}" for name in network.namespaces_of(state)]
        leftovers += [f"interface {name}" for name in network.interfaces_of(state)]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        leftovers += [f"mount {line.split()[4]}" for line in mounts if f"homelab-{state.id}" in line]
        return leftovers
