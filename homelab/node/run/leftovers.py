"""Removes the secrets of runs that are over: the end of a run whose agent was killed has left them."""

from __future__ import annotations

import os

from homelab.node import paths
from homelab.node.run import secret_files
from homelab.node.system import processes
from homelab.shared.protocol import layout


def remove_secrets(workdir: str, run: str | None = None) -> list[str]:
    """Remove the secrets of runs that nothing is alive of here (`run`: of this one alone); their names, rising.

    The next start of such a run brings them anew.
    """
    root = os.path.join(paths.expand(workdir), layout.RUNS)
    real = os.path.realpath(root)
    owners = [os.path.basename(owner) for owner in secret_files.owners() if os.path.dirname(owner) == real]
    removed = []
    for name in sorted(set(owners) & {layout.checked(run)} if run else set(owners)):
        folder = os.path.join(root, name)
        if _is_over(folder):
            secret_files.remove(folder)
            if not secret_files.has(folder):
                removed.append(name)
    return removed


def _is_over(folder: str) -> bool:
    """The newest attempt has begun here, or ended, and no process of this folder is left. One that is about to begin has not begun."""
    if _has_processes(folder):
        return False
    if not os.path.isdir(folder):  # a person has deleted it
        return True
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
