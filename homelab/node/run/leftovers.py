"""Removes the secrets of runs that are over: a node that lost power during a run still has them on its disk."""

from __future__ import annotations

import os

from homelab.node import paths
from homelab.node.system import processes
from homelab.protocol import layout


def remove_secrets(workdir: str, run: str | None = None) -> list[str]:
    """Take secrets.json of runs that nothing is alive of here from the disk (`run`: of this one alone); their names, rising.

    Only the agent reads that file, once, before it writes agent.json; the next start of the run brings it anew.
    """
    root = os.path.join(paths.expand(workdir), "runs")
    removed = []
    for name in [run] if run else _names(root):
        folder = os.path.join(root, layout.checked(name))
        secrets = os.path.join(folder, "secrets.json")
        if os.path.isfile(secrets) and _is_over(folder):
            try:
                os.unlink(secrets)
            except OSError:  # the disk has become read-only: the check `disk.readonly` reports it
                continue
            removed.append(name)
    return removed


def _names(root: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if layout.is_usable(name))
    except OSError:
        return []


def _is_over(folder: str) -> bool:
    """The newest attempt has begun here, or ended, and no process of this folder is left. One that is about to begin has not begun."""
    if _has_processes(folder):
        return False
    newest = next(reversed(paths.attempts(folder)), None)
    if newest is None:
        return False
    nodes = os.path.join(paths.attempt_dir(folder, newest), "nodes")  # under the name that this node had then
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    return any(os.path.exists(os.path.join(nodes, name, file)) for name in names for file in ("agent.json", "exit.json"))


def _has_processes(folder: str) -> bool:
    """By the folder they were started with: practice nodes share one /proc."""
    mark = b"HOMELAB_RUN_DIR=" + os.fsencode(folder)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return any(mark in processes._environment(pid) and processes.is_alive(pid) for pid in pids)
