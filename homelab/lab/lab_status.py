"""The state of a lab, as the kernel reports it (lab.json only says what was started).

The shape of `homelab lab status --json`:
{"lab": id, "folder", "backend", "network", "rate": str|null, "running": bool, "note": str, "cluster_file",
 "nodes": [{"name", "host", "port", "power": "on"|"off", "ssh": bool, "frozen": bool, "cable": "plugged"|"pulled",
            "cpu_cores": number|null, "processes": count, "first_process": pid|null, "network_namespace",
            "runs": {run: count of processes}, "home", "log"}]}
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from homelab.lab import cgroup, lab_files, nodes, procfs, sshd
from homelab.lab.lab_state import LabNode, LabState, boot_id
from homelab.lab.nodes import Backend


def collect(backend: Backend, state: LabState) -> dict[str, Any]:
    """Examine every node; all are asked for their SSH banner at the same time."""
    with ThreadPoolExecutor(len(state.nodes)) as pool:
        answers = list(pool.map(lambda node: sshd.banner(node.host, node.port), state.nodes))
    described = [_node(backend, state, node, answer is not None) for node, answer in zip(state.nodes, answers, strict=True)]
    note = ""
    if state.boot_id != boot_id():
        note = "the machine was restarted since"
    elif state.phase == "starting":
        note = "it is being started, or was interrupted while starting"
    return {
        "lab": state.id,
        "folder": state.folder,
        "backend": state.backend,
        "network": state.network,
        "rate": state.rate,
        "running": not note and any(node["power"] == "on" for node in described),
        "note": note,
        "cluster_file": str(state.path / lab_files.CLUSTER_FILE),
        "nodes": described,
    }


def _node(backend: Backend, state: LabState, node: LabNode, answers: bool) -> dict[str, Any]:
    first = nodes.init_of(state, node)
    pids = backend.processes(state, node)
    runs = Counter(run for pid in pids if (run := procfs.environment(pid).get("HOMELAB_RUN")))
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "power": "off" if first is None else "on",
        "ssh": answers,
        "frozen": backend.is_frozen(state, node),
        "cable": backend.cable(state, node),
        "cpu_cores": nodes.group(state, node, cgroup.find_hierarchies()).cpu_limit(),
        "processes": len(pids),
        "first_process": first,
        "network_namespace": node.network_namespace,
        "runs": dict(runs),
        "home": node.home,
        "log": str(state.node_folder(node) / "sshd.log"),
    }
