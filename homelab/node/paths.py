"""Folders of runs on this node (`homelab.shared.protocol.layout` below a workdir), and which attempts they hold."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from homelab.shared.protocol import files, layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_whole: dict[str, tuple[int, int, int]] = {}  # folder of an attempt -> what its plan.json was on the disk when it was read


def expand(path: str) -> str:
    """`~/x` below this user's home; other paths as they are."""
    return os.path.expanduser(path)


def keep_private(workdir: str, *, make: bool = False) -> None:
    """Let nobody else into the folders of runs and data, nor into the workdir where it is homelab's own, whatever umask made them.

    `make`: the folders that are not there yet, too. A home, a disk's top and a folder of everybody (the sticky bit of /tmp) stay as they are.
    """
    root = expand(workdir)
    for folder in (root, os.path.join(root, layout.RUNS), os.path.join(root, layout.DATA)):
        with contextlib.suppress(OSError):  # a disk that keeps no modes; what is wrong with it is said by who writes there
            if make:
                os.makedirs(folder, 0o700, exist_ok=True)
            state = os.stat(folder)
            is_everybodys = folder == root and (
                state.st_mode & stat.S_ISVTX or os.path.ismount(root) or os.path.realpath(root) == os.path.realpath(expand("~"))
            )
            if state.st_uid == os.geteuid() and state.st_mode & 0o077 and not is_everybodys:
                os.chmod(folder, 0o700)


def mounted_as(folder: str, mounts: str = "/proc/self/mounts") -> str:
    """The kind of file system that a folder lies on; "" where that is not known."""
    real, best, kind = os.path.realpath(folder), "", ""
    for line in files.text(mounts).splitlines():
        _, point, name, *_ = [*line.split(" "), "", "", ""]
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name  # a later mount at the same place covers the earlier one
    return kind


def run_dir(workdir: str, run: str) -> str:
    """Folder of a run."""
    return os.path.join(expand(workdir), layout.run(run))


def setup_lock() -> str:
    """The lock of setup and teardown on this account, whatever the workdir."""
    return expand("~/.homelab/setup/lock")


def supervised_dir(workdir: str, run: str) -> str:
    """Folder of a run's supervisor, where it was put on this node."""
    return os.path.join(expand(workdir), layout.supervised(run))


def speeds_file(workdir: str, model: str, method: Mapping[str, str]) -> str:
    """Measured speeds of a model and a method. Raises ValueError for a method that leads to another folder."""
    name = layout.speeds_name(model, method["kind"], method.get("base", "auto"))
    if "/" in name:
        raise ValueError(f"not a usable method: {method!r}")
    return os.path.join(expand(workdir), layout.SPEEDS, name)


def collective_file(workdir: str) -> str:
    """The record of the newest collective test that passed."""
    return os.path.join(expand(workdir), "collective.json")


def gpu_file(workdir: str) -> str:
    """What torch said of the cards when it was asked last."""
    return os.path.join(expand(workdir), "gpu.json")


def attempt_dir(run_folder: str, attempt: int) -> str:
    """Folder of one start of torchrun."""
    return os.path.join(run_folder, layout.attempt(attempt))


def node_dir(run_folder: str, attempt: int, node: str) -> str:
    """What this node writes about one attempt."""
    return os.path.join(run_folder, layout.node(attempt, node))


def names_here(run_folder: str, attempt: int) -> list[str]:
    """The names under which this machine was started in an attempt (where nodes share a disk: all of them)."""
    folder = os.path.join(run_folder, layout.nodes(attempt))
    try:
        return sorted(
            name for name in os.listdir(folder) if layout.is_usable(name) and os.path.exists(os.path.join(folder, name, layout.START_JSON))
        )
    except OSError:
        return []


def name_here(run_folder: str, attempt: int, node: str) -> str:
    """The name under which this machine took part, whatever cluster.toml calls it today; `node` where that cannot be told."""
    names = names_here(run_folder, attempt)
    return names[0] if node not in names and len(names) == 1 else node


def attempts(run_folder: str) -> Iterator[int]:
    """The numbers of the attempts that this node knows, the newest first. Each is looked at when it is taken: a run of months has thousands.

    A folder counts when its plan, or its start on a node, names that attempt of this run. Other folders must not look like a newer attempt.
    """
    try:
        names = os.listdir(os.path.join(run_folder, layout.ATTEMPTS))
    except OSError:
        return
    for number in sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True):
        if _counts(run_folder, number):
            yield number


def newest_attempt(run_folder: str) -> int:
    """The newest that this node knows; 0 where it knows none."""
    return next(attempts(run_folder), 0)


def _counts(run_folder: str, number: int) -> bool:
    """Whether a folder is an attempt. Costs one stat(2) when the plan was read before: a follower of a run asks ten times a second."""
    folder = attempt_dir(run_folder, number)
    plan = os.path.join(folder, layout.PLAN_JSON)
    try:
        status = os.stat(plan)
    except OSError:
        status = None
    mark = status and (status.st_mtime_ns, status.st_size, status.st_ino)
    if mark and _whole.get(folder) == mark:
        return True
    if mark and _speaks_of(run_folder, number, plan, "ranks"):
        _whole[folder] = mark
        return True
    # An attempt counts even where its plan was damaged after the start.
    nodes = os.path.join(folder, "nodes")
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    return any(_speaks_of(run_folder, number, os.path.join(nodes, name, layout.START_JSON), "command") for name in names)


def _speaks_of(run_folder: str, number: int, path: str, part: str) -> bool:
    """Whether a file is whole and of this run and attempt (a copied folder is of another)."""
    value = files.read_object(path)
    if value is None or not isinstance(value.get(part), list):
        return False
    run = os.path.basename(run_folder)
    return bool(value.get("attempt", number) == number and value.get("run", run) == run)
