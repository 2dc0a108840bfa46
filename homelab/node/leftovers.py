"""Secrets of runs that are over: a node that lost power in the middle of a run could not take them from its disk then."""

import os

from homelab.node import paths, processes


def remove_secrets(workdir, run=None):
    """Take secrets.json of runs that nothing is alive of here from the disk (`run`: of this one alone); their names, rising.

    Only the agent reads that file, once, before it writes agent.json; the next start of the run brings it anew.
    """
    root = os.path.join(paths.expand(workdir), "runs")
    found = []
    for name in [run] if run else _names(root):
        folder = os.path.join(root, paths.checked(name))
        secrets = os.path.join(folder, "secrets.json")
        if os.path.isfile(secrets) and _is_over(folder):
            try:
                os.unlink(secrets)
            except OSError:  # a disk that is read-only by now: `disk.readonly` tells that
                continue
            found.append(name)
    return found


def _names(root):
    try:
        return sorted(name for name in os.listdir(root) if paths.is_usable(name))
    except OSError:
        return []


def _is_over(folder):
    """The newest attempt has begun here, or ended, and no process of this folder is left. One that is about to begin has not begun."""
    if _has_processes(folder):
        return False
    newest = (paths.attempts(folder) or [None])[-1]
    if newest is None:
        return False
    nodes = os.path.join(paths.attempt_dir(folder, newest), "nodes")  # by whatever name this node was called then
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    return any(os.path.exists(os.path.join(nodes, name, file)) for name in names for file in ("agent.json", "exit.json"))


def _has_processes(folder):
    """By the folder they were started with: practice nodes share one /proc."""
    mark = b"HOMELAB_RUN_DIR=" + os.fsencode(folder)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return any(mark in processes._environment(pid) and processes.is_alive(pid) for pid in pids)
