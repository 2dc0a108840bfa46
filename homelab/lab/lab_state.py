"""lab.json: what a lab is made of. Every resource's name follows from it, so it is written before the first is made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from homelab.controller.base.errors import HomelabError, InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import procfs

STATE_FILE = "lab.json"
LOCK_FILE = "lab.lock"
NODES_FOLDER = "nodes"
NODES_MARK = ".homelab-lab"
NODE_VARIABLE = "HOMELAB_LAB_NODE"
ID_VARIABLE = "HOMELAB_LAB_ID"

BackendName = Literal["loopback", "namespaces"]


@dataclass(frozen=True)
class LabNode:
    """One practice node. `power` and `cable` are as the last fault left them; `cpu` and `memory_bytes` are the limits (cores, bytes) that `up` set."""

    name: str
    number: int
    host: str
    port: int
    interface: str
    user: str
    python: str
    home: str
    workdir: str
    cpu: float | None = None
    memory_bytes: int | None = None
    power: Literal["on", "off"] = "on"
    cable: Literal["plugged", "pulled"] = "plugged"
    # The name for `ip netns exec` (extra faults: nft, mtu); empty on the loopback backend.
    network_namespace: str = ""
    uid: int | None = None  # of an account that only this node has; None: the one that `up` ran as


@dataclass(frozen=True)
class LabState:
    """All of lab.json. `folder` is absolute, links resolved; `shared` stays visible below a node's private /tmp."""

    folder: str
    id: str
    backend: BackendName
    boot_id: str
    phase: Literal["starting", "up"]
    nodes: tuple[LabNode, ...]
    network: str = ""
    rate: str | None = None
    shared: tuple[str, ...] = ()
    schema: int = 1

    @property
    def path(self) -> Path:
        """The lab's folder."""
        return Path(self.folder)

    def node(self, name: str) -> LabNode:
        """The node of this name. Raises InputError that lists the nodes."""
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        raise InputError(
            f'no node "{name}" in this lab.{did_you_mean(name, names)}', where=self.folder, hint=f"its nodes are: {', '.join(names)}"
        )

    def node_folder(self, node: LabNode) -> Path:
        """Where the node's sshd, log and home are."""
        return self.path / NODES_FOLDER / node.name

    def environment(self, node: LabNode) -> dict[str, str]:
        """What every process of the node has in its environment: the marker, and how its threads wait.

        All nodes share this machine's processors, and threads that spin while they wait (libgomp's way) take them from the other
        nodes: 36 steps of a tiny model by three ranks on two cores took 20 s, and 1.9 s with threads that sleep (measured).
        """
        return {NODE_VARIABLE: f"{self.folder}:{node.name}", ID_VARIABLE: self.id, "OMP_WAIT_POLICY": "PASSIVE"}

    def with_node(self, name: str, **changes: Any) -> LabState:
        """The state with some fields of one node changed."""
        return replace(self, nodes=tuple(replace(n, **changes) if n.name == name else n for n in self.nodes))

    def save(self) -> None:
        """Replace lab.json at once."""
        file = self.path / STATE_FILE
        beside = file.with_name(f".{STATE_FILE}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(self), indent=2) + "\n")
        beside.replace(file)


def user_name() -> str:
    """The account this process runs as. Raises HomelabError when it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise HomelabError(
            f"user {os.geteuid()} has no entry in /etc/passwd, and sshd lets nobody in without one",
            where="this machine",
            hint="run as a user with an account",
        ) from None


def boot_id() -> str:
    """Different after every boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_lab(folder: Path) -> bool:
    """True when a lab was started in `folder` and not taken down."""
    return (folder / STATE_FILE).is_file()


def load(folder: Path) -> LabState:
    """The state of the lab in `folder`. Raises InputError when there is none, HomelabError when it cannot be used."""
    file = folder / STATE_FILE
    try:
        data = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("there is no lab here", where=str(folder), hint=Hint("start one: {}", homelab("lab up", str(folder)))) from None
    except (OSError, ValueError) as error:
        raise HomelabError(f"lab.json cannot be read: {error}", where=str(file), hint="restore it, or move it away") from None
    try:
        data["nodes"] = tuple(LabNode(**node) for node in data["nodes"])
        data["shared"] = tuple(data["shared"])
        state = LabState(**data)
    except (TypeError, KeyError) as error:
        raise HomelabError(
            f"lab.json was written by another version of homelab: {error}",
            where=str(file),
            hint="take the lab down with the version that started it",
        ) from None
    starter = next((node.user for node in state.nodes if node.uid is None), None)
    if starter not in (None, me := user_name()):
        raise HomelabError(
            f"this lab was started by {starter}, and {me} cannot see its processes",
            where=str(file),
            hint=f"run the command as {starter}" + (" (sudo)" if starter == "root" else ""),
        )
    if Path(state.folder) != folder.resolve():
        raise HomelabError(
            f"this lab was started as {state.folder}; its nodes look for their files there",
            where=str(file),
            hint=f"move the folder back: mv {shlex.quote(str(folder))} {shlex.quote(state.folder)}",
        )
    return state


@contextlib.contextmanager
def locked(folder: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Only one command changes a lab at a time; wait `timeout_s` for the other one. Raises HomelabError.

    The lock ends with its process: a killed command leaves none behind.
    """
    file = folder / LOCK_FILE
    try:
        stream = file.open("a")
    except OSError as error:
        raise HomelabError(
            f"the lab's folder cannot be written: {error.strerror}", where=str(folder), hint="choose another folder"
        ) from None
    with stream:

        def taken() -> bool:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not procfs.until(taken, timeout_s):
            raise HomelabError(
                "another command is changing this lab just now",
                where=str(folder),
                hint=Hint("wait for it to end, then look: {}", homelab("lab status", str(folder))),
            )
        yield
