"""Paths of a run on a node: the only place of the agent that spells them (the controller's twin is `homelab.runs.paths`)."""

import os
import re

_SAFE = re.compile(r"^\w[\w.-]*$")


def checked(name):
    """The name itself, when it is one path component that cannot climb; ValueError otherwise."""
    if not isinstance(name, str) or not _SAFE.match(name):
        raise ValueError("not a usable name: %r" % (name,))
    return name


def expand(path):
    """`~/x` below this user's home; other paths as they are."""
    return os.path.expanduser(path)


def run_dir(workdir, run):
    """Folder of a run."""
    return os.path.join(expand(workdir), "runs", checked(run))


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
    return sorted(int(name) for name in names if name.isdigit())
