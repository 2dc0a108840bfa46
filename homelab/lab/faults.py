"""What can happen to a node during a run: the names of these faults, and how one is injected and undone."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TypedDict

from homelab.controller.base.errors import HomelabError, InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import cgroup, nodes, procfs
from homelab.lab.lab_state import LabNode, LabState
from homelab.lab.nodes import Backend
from homelab.lab.tools import machine_lock
from homelab.shared.protocol import files, waiting_mark

FAULTS = {
    "kill-worker": "kill -9 of one training process",
    "power-cut": "everything of the node ends at once",
    "power-on": "the node starts again",
    "pull-cable": "the network cable is pulled",
    "plug-cable": "the network cable is plugged in again",
    "freeze": "every process is stopped; connections stay open",
    "thaw": "the stopped processes continue",
    "throttle": "throttle=0.3: at most 0.3 of a core; throttle=off: as `up` set it",
}
# The others cannot be undone, or undo one themselves.
UNDONE_BY = {"power-cut": "power-on", "pull-cable": "plug-cable", "freeze": "thaw", "throttle": "throttle=off"}
# What only the namespaces backend can do.
NEED_NAMESPACES = ("pull-cable", "plug-cable")


class FaultEntry(TypedDict):
    """One line of `homelab lab faults --json`. `undo`: whether `--undo` takes it back."""

    name: str
    title: str
    needs: list[str]
    undo: bool


def entries() -> list[FaultEntry]:
    """All of them."""
    return [
        FaultEntry(name=name, title=title, needs=["namespaces"] if name in NEED_NAMESPACES else [], undo=name in UNDONE_BY)
        for name, title in FAULTS.items()
    ]


def undoing(text: str, lab: str) -> str:
    """The fault that undoes this one. Raises InputError for one that cannot be undone, and for an unknown one."""
    kind = text.partition("=")[0]
    if kind not in UNDONE_BY:
        parse(text)
        hint = homelab("recover") if kind == "kill-worker" else homelab("lab status", lab)
        raise InputError(f"{kind} cannot be undone", where="--undo", hint=hint)
    return UNDONE_BY[kind]


@dataclass(frozen=True)
class Fault:
    """A parsed fault. `cores` belongs to throttle alone; None there means "as `up` set it"."""

    kind: str
    cores: float | None = None


def parse(text: str) -> Fault:
    """ "power-cut" or "throttle=0.3" -> Fault. Raises InputError that lists what there is."""
    kind, separator, value = text.partition("=")
    if kind not in FAULTS:
        raise InputError(
            f'no fault "{text}".{did_you_mean(kind, FAULTS)}',
            where="the fault",
            hint="there are: " + "; ".join(f"{name} ({effect})" for name, effect in FAULTS.items()),
        )
    if kind != "throttle":
        if separator:
            raise InputError(f"{kind} takes no value, got {text!r}", where="the fault", hint=f"write just {kind}")
        return Fault(kind)
    if value == "off":
        return Fault(kind)
    try:
        return Fault(kind, check_cores(float(value)))
    except ValueError:
        raise InputError(f"throttle wants a number of cores, got {text!r}", where="the fault", hint="throttle=0.3") from None


def check_cores(cores: float) -> float:
    """A CPU limit the kernel can set, unchanged. Raises InputError."""
    most = os.cpu_count() or 1
    if not cgroup.MINIMUM_CORES <= cores <= most:
        raise InputError(
            f"a CPU limit of {cores:g} cores cannot be set",
            where="the CPU limit",
            hint=f"from {cgroup.MINIMUM_CORES:g} to {most} cores on this machine, e.g. 0.3",
        )
    return cores


def inject(backend: Backend, state: LabState, node: LabNode, fault: Fault) -> LabState:
    """Inject the fault and return the state to save (power and cable outlive the command). Raises HomelabError when it is impossible."""
    on = nodes.init_of(state, node) is not None
    if fault.kind == "power-on":
        if on:
            raise HomelabError(f"{node.name} is running already", where=node.name, hint=homelab("lab status", str(state.folder)))
        backend.power_cut(state, node)  # remains of a node that died by other means
        with machine_lock():
            backend.power_on(state, node)
        return state.with_node(node.name, power="on")
    if fault.kind in ("pull-cable", "plug-cable"):
        after = state.with_node(node.name, cable="pulled" if fault.kind == "pull-cable" else "plugged")
        backend.set_cable(after, after.node(node.name))
        return after
    if fault.kind == "throttle":
        limit = node.cpu if fault.cores is None else fault.cores
        nodes.group(state, node, cgroup.find_hierarchies()).limit_cpu(limit)
        return state
    if not on:
        raise HomelabError(
            f"{node.name} has no power", where=node.name, hint=homelab("lab fault", str(state.folder), node.name, "power-on")
        )
    if fault.kind == "power-cut":
        backend.power_cut(state, node)
        return state.with_node(node.name, power="off")
    if fault.kind == "freeze":
        backend.freeze(state, node)
    elif fault.kind == "thaw":
        backend.thaw(state, node)
    else:
        assert fault.kind == "kill-worker"
        procfs.send([worker_of(backend, state, node)], signal.SIGKILL)
    return state


def worker_of(backend: Backend, state: LabState, node: LabNode) -> int:
    """The training process with the lowest local rank on this node. Raises HomelabError when there is none.

    torchrun gives its workers LOCAL_RANK; data-loader processes inherit it, so the topmost process of a rank is meant.
    """
    ranks = {}
    for pid in backend.processes(state, node):
        environment = procfs.environment(pid)
        waits = waiting_mark.waits(is_marked=waiting_mark.VARIABLE in environment, name=files.text(f"/proc/{pid}/comm"))
        if "HOMELAB_RUN" in environment and environment.get("LOCAL_RANK", "").isdigit() and not waits:
            ranks[pid] = int(environment["LOCAL_RANK"])
    parents = {pid: process.parent for pid in ranks if (process := procfs.read(pid))}
    top = [pid for pid, parent in parents.items() if parent not in ranks]
    if not top:
        raise HomelabError(
            f"no training process runs on {node.name}",
            where=node.name,
            hint=Hint("launch a run first; {} shows which nodes it uses", homelab("status")),
        )
    return min(top, key=lambda pid: (ranks[pid], pid))
