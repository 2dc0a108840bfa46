"""Too few resources: disks that are full, small, read-only or out of inodes; memory, shared memory, open files."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from homelab.lab.cgroup import Hierarchy
from homelab.lab.lab import Lab
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable, add, misconfiguration
from scripts.practice.misconfigurations.node_changes import covered, inside, mounted, needs, own_folder, sessions_have, sshd_process, view

MIB = 2**20


@misconfiguration("full-disk", "the disk of the workdir is full to the last byte", "disk.room", "disk.writable", "ssh.login")
def full_disk(lab: Lab, node: str) -> Iterator[None]:
    """Not even the agent can be unpacked."""
    workdir = lab.state.node(node).workdir
    with mounted(lab, node, workdir, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        _fill(view(lab, node, workdir) / "old-checkpoints")
        yield


def _workdir(options: str) -> Inject:
    """The workdir is on an empty tmpfs with these mount options."""
    return lambda lab, node: mounted(lab, node, lab.state.node(node).workdir, "-t", "tmpfs", "-o", options, "tmpfs")


# A run starts, and fails when it writes its first checkpoint.
add("small-disk", "the disk of the workdir has 200 MB free", "disk.room", inject=_workdir("size=200m"))
add("no-inodes", "the workdir's disk has free space, and can hold no more files", "disk.inodes", inject=_workdir("size=8g,nr_inodes=400"))


@misconfiguration("read-only-disk", "the workdir's disk is mounted read-only", "disk.readonly", "disk.writable")
def read_only_disk(lab: Lab, node: str) -> Iterator[None]:
    """As the kernel does with a file system that has errors."""
    workdir = lab.state.node(node).workdir
    with mounted(lab, node, workdir, "--bind", "-o", "ro", workdir):
        yield


@misconfiguration("full-temporary", "the folder for temporary files is full", "disk.temporary")
def full_temporary(lab: Lab, node: str) -> Iterator[None]:
    """A small tmpfs, filled."""
    with own_folder(lab, node) as folder, mounted(lab, node, str(folder), "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        _fill(view(lab, node, folder) / "rubbish")
        with sessions_have(lab, node, TMPDIR=str(folder)):
            yield


def _fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 65536)


# As in a container that was started without --shm-size.
add(
    "small-shm", "the node's /dev/shm has 8 MB", "memory.shm",
    inject=lambda lab, node: mounted(lab, node, "/dev/shm", "-t", "tmpfs", "-o", "size=8m", "tmpfs"), needs=("card",),
)  # fmt: skip


@misconfiguration("few-open-files", "a login may open 256 files", "memory.open_files")
def few_open_files(lab: Lab, node: str) -> Iterator[None]:
    """Set for the SSH service, so for everything that it starts."""
    needs("prlimit", package="util-linux")
    pid = sshd_process(lab, node)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, hard))
    try:
        yield
    finally:
        resource.prlimit(sshd_process(lab, node), resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def free_memory(lab: Lab, node: str, kibibytes: int) -> Iterator[None]:
    """/proc/meminfo says that so much is free, as it does in a container with lxcfs."""
    text = inside(lab, node, "cat", "/proc/meminfo")
    text = re.sub(r"(?m)^(MemFree|MemAvailable):.*$", rf"\1:         {kibibytes} kB", text)
    with covered(lab, node, "/proc/meminfo", text):
        yield


add("little-memory", "the node has 200 MB of memory free", "memory.ram", inject=lambda lab, node: free_memory(lab, node, 200 * 1024))


@misconfiguration("memory-limit", "logins may use 400 MB of memory", "memory.ram")
def memory_limit(lab: Lab, node: str) -> Iterator[None]:
    """A limit of the control group, as systemd's MemoryMax and containers set it. `free` shows the machine's memory."""
    tree = _memory_tree()
    group = tree.path / f"homelab-{lab.state.id}-fault"
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
        if (path / "cgroup.subtree_control").exists() and "memory" in (path / "cgroup.subtree_control").read_text().split():
            return Hierarchy(path, 2)
    raise NotInjectable("there is no control group for memory that we may write", where="/sys/fs/cgroup", hint="start as root")


def _group_of(pid: int, tree: Hierarchy) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (tree.version == 1 and "memory" in controllers.split(",")) or (tree.version == 2 and controllers == ""):
            return tree.path / path.lstrip("/")
    return tree.path
