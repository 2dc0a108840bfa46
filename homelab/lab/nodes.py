"""What both backends share: a node's folder, its first process, and the promises a backend makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.lab import node_init, procfs, sshd
from homelab.lab.cgroup import Hierarchies, NodeGroup
from homelab.lab.lab_state import ID_VARIABLE, NODE_VARIABLE, LabNode, LabState
from homelab.lab.tools import program

INIT_FILE = str(Path(node_init.__file__).resolve())


class Backend(Protocol):
    """How nodes are made on this machine. Every method may be called again after it was interrupted."""

    def place(self, state: LabState) -> LabState:
        """Choose addresses and ports that are free now (called under the machine's lock)."""
        ...

    def prepare(self, state: LabState) -> None:
        """Make what all nodes share: the network."""
        ...

    def configure(self, state: LabState, node: LabNode, client_key: str) -> str:
        """Write the node's files; return its public host key."""
        ...

    def power_on(self, state: LabState, node: LabNode) -> None:
        """Start the node without waiting for its sshd to answer (called under the machine's lock)."""
        ...

    def power_cut(self, state: LabState, node: LabNode) -> None:
        """End everything of the node at once, with no goodbye to anybody."""
        ...

    def processes(self, state: LabState, node: LabNode) -> set[int]:
        """The node's processes, numbered as this machine sees them."""
        ...

    def set_cable(self, state: LabState, node: LabNode) -> None:
        """Make the cable what `node.cable` says."""
        ...

    def cable(self, state: LabState, node: LabNode) -> str:
        """ "plugged" or "pulled", as it is in truth."""
        ...

    def freeze(self, state: LabState, node: LabNode) -> None:
        """Stop every process of the node where it stands; connections stay open."""
        ...

    def thaw(self, state: LabState, node: LabNode) -> None:
        """Let the processes go on."""
        ...

    def is_frozen(self, state: LabState, node: LabNode) -> bool:
        """True when every process of the node is frozen."""
        ...

    def remove(self, state: LabState) -> None:
        """Take everything away, whatever of it exists."""
        ...

    def leftovers(self, state: LabState) -> list[str]:
        """What of the lab still exists on this machine, one line each."""
        ...


def group(state: LabState, node: LabNode, hierarchies: Hierarchies) -> NodeGroup:
    """The node's cgroups."""
    return NodeGroup(state.id, node.name, hierarchies)


def write_spec(state: LabState, node: LabNode, **spec: Any) -> Path:
    """Write what node_init.py reads."""
    file = state.node_folder(node) / "init.json"
    file.write_text(json.dumps(spec, indent=2) + "\n")
    return file


def start(state: LabState, node: LabNode, spec: Path, prefix: tuple[str, ...] = ()) -> None:
    """Run node_init.py in a session of its own: it outlives the terminal, and is no child of ours that must be reaped."""
    log = state.node_folder(node) / "sshd.log"
    command = [program("setsid"), "--fork", *prefix, sys.executable, "-I", "-S", INIT_FILE, str(spec)]
    environment = {"PATH": sshd.SYSTEM_PATH, **state.environment(node)}
    with log.open("ab") as stream:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, cwd="/", check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise HomelabError(f"{node.name} did not start: {error}", where=str(log), hint="read the log") from error


def marked(state: LabState, node: LabNode | None = None) -> set[int]:
    """The processes that carry the marker of this node (or of any node of the lab), without us and our ancestors."""
    name, value = (ID_VARIABLE, state.id) if node is None else (NODE_VARIABLE, state.environment(node)[NODE_VARIABLE])
    return procfs.with_environment(name, value) - procfs.self_and_ancestors()


def init_of(state: LabState, node: LabNode) -> int | None:
    """The node's first process, or None when the node is off."""
    spec = str(state.node_folder(node) / "init.json")
    for pid in sorted(marked(state, node)):
        words = procfs.command_line(pid)
        # The programs that lead to it (setsid, unshare) carry the same words at the end of their command line.
        if words[-1:] == [spec] and words[1:2] == ["-I"]:
            return pid
    return None


def describe(pids: set[int]) -> list[str]:
    """One line per process, for people."""
    return [f"process {pid}: {' '.join(procfs.command_line(pid))[:100]}" for pid in sorted(pids)]


def survived(state: LabState, node: LabNode, pids: set[int]) -> HomelabError:
    """The error for processes of a node that SIGKILL did not end."""
    hint = homelab("lab down", str(state.folder))
    return HomelabError("these processes survived SIGKILL:\n" + "\n".join(describe(pids)), where=node.name, hint=hint)


def python_home_folders(python: str) -> list[str]:
    """The folders a Python needs to start: its virtual environment, and the installation behind it."""
    path = Path(os.path.expanduser(python))
    return list(dict.fromkeys([str(path.parent.parent), str(path.resolve().parent.parent)]))
