"""Paths of a run on a node: the only place of the agent that spells them (the controller's twin is `homelab.runs.paths`)."""

import os
import re

from homelab.node import files

_SAFE = re.compile(r"\w[\w.-]*")
_whole = {}  # folder of an attempt -> what its plan.json was on the disk when it was read


def is_usable(name):
    """True for a name that is one path component and cannot climb."""
    return isinstance(name, str) and _SAFE.fullmatch(name) is not None


def checked(name):
    """The name itself, when it is usable; ValueError otherwise."""
    if not is_usable(name):
        raise ValueError("not a usable name: %r" % (name,))
    return name


def expand(path):
    """`~/x` below this user's home; other paths as they are."""
    return os.path.expanduser(path)


def run_dir(workdir, run):
    """Folder of a run."""
    return os.path.join(expand(workdir), "runs", checked(run))


def supervised_dir(workdir, run):
    """Folder of a run's supervisor, where it was put on this node."""
    return os.path.join(expand(workdir), "supervised", checked(run))


def speeds_file(workdir, model, kind):
    """Measured speeds of a model and a method (the twin of `homelab.worker.speed.file_name`, whose dataclass needs Python 3.10)."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    name = "%s-%s.json" % (re.sub(r"[^a-z0-9._-]+", "-", last) or "model", kind)
    if "/" in name:
        raise ValueError("not a usable method: %r" % (kind,))
    return os.path.join(expand(workdir), "speeds", name)


def collective_file(workdir):
    """The record of the newest collective test that passed."""
    return os.path.join(expand(workdir), "collective.json")


def gpu_file(workdir):
    """What torch said of the cards when it was asked last."""
    return os.path.join(expand(workdir), "gpu.json")


def attempt_dir(run_folder, attempt):
    """Folder of one start of torchrun."""
    return os.path.join(run_folder, "attempts", str(int(attempt)))


def node_dir(run_folder, attempt, node):
    """What this node writes about one attempt."""
    return os.path.join(attempt_dir(run_folder, attempt), "nodes", checked(node))


def names_here(run_folder, attempt):
    """The names under which this machine was started in an attempt (where nodes share a disk: all of them)."""
    folder = os.path.join(attempt_dir(run_folder, attempt), "nodes")
    try:
        return sorted(name for name in os.listdir(folder) if is_usable(name) and os.path.exists(os.path.join(folder, name, "start.json")))
    except OSError:
        return []


def name_here(run_folder, attempt, node):
    """The name under which this machine took part, whatever cluster.toml calls it today; `node` where that cannot be told."""
    names = names_here(run_folder, attempt)
    return names[0] if node not in names and len(names) == 1 else node


def attempts(run_folder):
    """Numbers of the attempts this node knows, rising. A folder counts that a plan, or a start on a node, says to be that attempt of this run:
    any other is nobody's, and must not look as if the run had gone on elsewhere.
    """
    try:
        names = os.listdir(os.path.join(run_folder, "attempts"))
    except OSError:
        return []
    return sorted(
        int(name) for name in names if name.isdecimal() and name == str(int(name)) and _counts(run_folder, int(name))
    )


def _counts(run_folder, number):
    """Costs one stat(2) when the plan was read before: who follows a run asks ten times a second."""
    folder = attempt_dir(run_folder, number)
    plan = os.path.join(folder, "plan.json")
    try:
        found = os.stat(plan)
    except OSError:
        found = None
    mark = found and (found.st_mtime_ns, found.st_size, found.st_ino)
    if mark and _whole.get(folder) == mark:
        return True
    if _speaks_of(run_folder, number, plan, "ranks"):
        _whole[folder] = mark
        return True
    # A plan that was damaged later takes nothing from the attempt that was started by it.
    nodes = os.path.join(folder, "nodes")
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    return any(_speaks_of(run_folder, number, os.path.join(nodes, name, "start.json"), "command") for name in names)


def _speaks_of(run_folder, number, path, part):
    """Whether a file is whole and of this run and attempt (a copied folder is of another)."""
    value = files.read_object(path)
    if value is None or not isinstance(value.get(part), list):
        return False
    return value.get("attempt", number) == number and value.get(
        "run", os.path.basename(run_folder)
    ) == os.path.basename(run_folder)
