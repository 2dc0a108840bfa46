"""Flaws of a node's room: disks that are full, small, read-only or out of inodes; memory, shared memory, open files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from homelab.lab.cgroup import Hierarchy
from homelab.lab.flaws.flaw import NotInjectable, flaw
from homelab.lab.flaws.inside import covered, inside, mounted, needs, own_folder, sessions_have, sshd_process, view
from homelab.lab.lab import Lab

MIB = 2**20


@flaw("full-disk", "the disk of the workdir is full to the last byte", "disk.room", "disk.writable", "ssh.login")
def full_disk(lab: Lab, node: str) -> Iterator[None]:
    """Not even our agent can be unpacked."""
    workdir = lab.state.node(node).workdir
    with mounted(lab, node, workdir, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        _fill(view(lab, node, workdir) / "old-checkpoints")
        yield


@flaw("small-disk", "the disk of the workdir has 200 MB free", "disk.room")
def small_disk(lab: Lab, node: str) -> Iterator[None]:
    """A run starts, and dies when it writes its first checkpoint."""
    with mounted(lab, node, lab.state.node(node).workdir, "-t", "tmpfs", "-o", "size=200m", "tmpfs"):
        yield


@flaw("read-only-disk", "the workdir's disk is mounted read-only", "disk.readonly", "disk.writable")
def read_only_disk(lab: Lab, node: str) -> Iterator[None]:
    """What the kernel does to a file system with errors."""
    workdir = lab.state.node(node).workdir
    with mounted(lab, node, workdir, "--bind", "-o", "ro", workdir):
        yield


@flaw("no-inodes", "the workdir's disk has room, and can hold no more files", "disk.inodes")
def no_inodes(lab: Lab, node: str) -> Iterator[None]:
    """Millions of small files of something else."""
    with mounted(lab, node, lab.state.node(node).workdir, "-t", "tmpfs", "-o", "size=8g,nr_inodes=400", "tmpfs"):
        yield


@flaw("full-temporary", "the folder for temporary files is full", "disk.temporary")
def full_temporary(lab: Lab, node: str) -> Iterator[None]:
    """A small tmpfs, and something that never cleans up."""
    with own_folder(lab, node) as folder, mounted(lab, node, str(folder), "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        _fill(view(lab, node, folder) / "rubbish")
        with sessions_have(lab, node, TMPDIR=str(folder)):
            yield


def _fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 65536)


@flaw("small-shm", "the node's /dev/shm has 8 MB", "memory.shm", card=True)
def small_shm(lab: Lab, node: str) -> Iterator[None]:
    """A container that was started without --shm-size."""
    with mounted(lab, node, "/dev/shm", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        yield


@flaw("few-open-files", "a login may open 256 files", "memory.open_files")
def few_open_files(lab: Lab, node: str) -> Iterator[None]:
    """Set for the SSH service, so for everything that it starts."""
    needs("prlimit", package="util-linux")
    pid = sshd_process(lab, node)
    limits = Path(f"/proc/{pid}/limits").read_text()
    found = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits)
    assert found, limits
    _limit_files(pid, 256, int(found.group(2)))
    try:
        yield
    finally:
        _limit_files(sshd_process(lab, node), int(found.group(1)), int(found.group(2)))


def _limit_files(pid: int, soft: int, hard: int) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@flaw("little-memory", "the node has 200 MB of memory free", "memory.ram")
def little_memory(lab: Lab, node: str) -> Iterator[None]:
    """Another program has the rest. (/proc/meminfo says so, as it does in a container with lxcfs.)"""
    text = inside(lab, node, "cat", "/proc/meminfo")
    text = re.sub(r"(?m)^(MemFree|MemAvailable):.*$", r"\1:         204800 kB", text)
    with covered(lab, node, "/proc/meminfo", text):
        yield


@flaw("memory-limit", "logins may use 400 MB of memory", "memory.ram")
def memory_limit(lab: Lab, node: str) -> Iterator[None]:
    """A limit of the control group, as systemd's MemoryMax and containers set it. (`free` shows the machine's.)"""
    tree = _memory_tree()
    group = tree.path / f"homelab-{lab.state.id}-flaw"
    pid = sshd_process(lab, node)
    home = _group_of(pid, tree)
    group.mkdir()
    try:
        limit = "memory.max" if tree.version == 2 else "memory.limit_in_bytes"
        (group / limit).write_text(str(400 * MIB))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (home / "cgroup.procs").write_text(member)
        group.rmdir()


def _memory_tree() -> Hierarchy:
    for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        if (path / "memory.limit_in_bytes").exists():
            return Hierarchy(path, 1)
        if (path / "cgroup.subtree_control").exists() and "memory" in (
            path / "cgroup.subtree_control"
        ).read_text().split():
            return Hierarchy(path, 2)
    raise NotInjectable(
        "there is no control group for memory that we may write", where="/sys/fs/cgroup", hint="start as root"
    )


def _group_of(pid: int, tree: Hierarchy) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (tree.version == 1 and "memory" in controllers.split(",")) or (tree.version == 2 and controllers == ""):
            return tree.path / path.lstrip("/")
    return tree.path
