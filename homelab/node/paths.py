"""Paths of a run on a node: the only place of the agent that spells them (the controller's twin is `homelab.runs.paths`)."""

import os
import re

_SAFE = re.compile(r"\w[\w.-]*")


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


def attempt_dir(run_folder, attempt):
    """Folder of one start of torchrun."""
    return os.path.join(run_folder, "attempts", str(int(attempt)))


def node_dir(run_folder, attempt, node):
    """What this node writes about one attempt."""
    return os.path.join(attempt_dir(run_folder, attempt), "nodes", checked(node))


def attempts(run_folder):
    """Numbers of the attempts this node knows, rising."""
    try:
        names = os.listdir(os.path.join(run_folder, "attempts"))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())
