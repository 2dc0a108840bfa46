"""Limits of CPU and memory and the freezer, on cgroup v1 and v2. One group per node: homelab-<lab id>/<node>."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs
from homelab.shared.protocol import files

# Short periods keep a limited node responsive: with the default of 100 ms it is stopped for most of every 100 ms.
PERIOD_US = 20_000
# The kernel takes no quota below 1 ms.
MINIMUM_CORES = 1_000 / PERIOD_US


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup tree."""

    path: Path
    version: Literal[1, 2]


@dataclass(frozen=True)
class Hierarchies:
    """Where the limits and the freezer are; None where this machine has none that we may write."""

    cpu: Hierarchy | None
    freezer: Hierarchy | None
    memory: Hierarchy | None = None


def find_hierarchies(mountinfo: Path = Path("/proc/self/mountinfo")) -> Hierarchies:
    """Look through the mounts. A controller is in a v1 tree of its own or in the v2 tree; the v2 tree can always freeze."""
    cpu = freezer = memory = unified = None
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        path = Path(left.split()[4].encode().decode("unicode_escape"))
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2" and unified is None:
            unified = Hierarchy(path, 2)
        elif kind == "cgroup":
            controllers = options.split(",")
            if "cpu" in controllers and cpu is None:
                cpu = Hierarchy(path, 1)
            if "freezer" in controllers and freezer is None:
                freezer = Hierarchy(path, 1)
            if "memory" in controllers and memory is None:
                memory = Hierarchy(path, 1)
    if unified and cpu is None and "cpu" in files.text(unified.path / "cgroup.controllers").split():
        cpu = unified
    if unified and memory is None and "memory" in files.text(unified.path / "cgroup.controllers").split():
        memory = unified
    return Hierarchies(_writable(cpu), _writable(freezer or unified), _writable(memory))


def _writable(hierarchy: Hierarchy | None) -> Hierarchy | None:
    if hierarchy is None or not os.access(hierarchy.path, os.W_OK):
        return None
    # A v2 tree also wants its members file writable, or no process can be moved into our group.
    return hierarchy if os.access(hierarchy.path / "cgroup.procs", os.W_OK) else None


@dataclass(frozen=True)
class NodeGroup:
    """The groups of one node: one folder on v2, one per controller on v1."""

    lab: str
    node: str
    hierarchies: Hierarchies

    def folders(self) -> list[Path]:
        """Every folder of this node, whether made or not."""
        trees = [tree for tree in (self.hierarchies.cpu, self.hierarchies.freezer, self.hierarchies.memory) if tree]
        return list(dict.fromkeys(self._folder(tree) for tree in trees))

    def _folder(self, tree: Hierarchy) -> Path:
        return tree.path / lab_folder(self.lab) / self.node

    def member_files(self) -> list[str]:
        """Writing "0" into each of these moves the writer into the node's groups."""
        return [str(folder / "cgroup.procs") for folder in self.folders()]

    def create(self) -> None:
        """Make the groups. Raises HomelabError when the kernel does not let us hand out a controller."""
        for folder in self.folders():
            folder.parent.mkdir(exist_ok=True)
            for controller, tree in (("cpu", self.hierarchies.cpu), ("memory", self.hierarchies.memory)):
                if tree and tree.version == 2 and folder.is_relative_to(tree.path):
                    for parent in (tree.path, folder.parent):
                        _enable(controller, parent)
            folder.mkdir(exist_ok=True)
            # Give the lab the weight of one ordinary process per node: by default all nodes together would weigh as much as one.
            count = sum(1 for entry in folder.parent.iterdir() if entry.is_dir())
            for name, one in (("cpu.shares", 1024), ("cpu.weight", 100)):
                if (folder.parent / name).exists():
                    (folder.parent / name).write_text(str(one * count))

    def limit_cpu(self, cores: float | None) -> None:
        """Let the node compute at most `cores` (0.3: three tenths of one core); None: no limit."""
        folder = self._cpu_folder()
        quota_us = None if cores is None else max(1000, round(cores * PERIOD_US))
        assert self.hierarchies.cpu is not None
        if self.hierarchies.cpu.version == 2:
            (folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))

    def limit_memory(self, size_bytes: int) -> None:
        """Let the node's processes hold at most so many bytes, swap included; who asks for more is killed. Raises HomelabError without a controller."""
        memory = self.hierarchies.memory
        if memory is None:
            raise HomelabError(
                "a memory limit needs a cgroup tree with the memory controller that we may write, and there is none",
                where=self.node, hint="start the lab as root (sudo), or do without --memory",
            )  # fmt: skip
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if memory.version == 1 else ("memory.max", "memory.swap.max")
        folder = self._folder(memory)
        (folder / names[0]).write_text(str(size_bytes))
        if (folder / names[1]).exists():  # of a kernel that counts swap
            (folder / names[1]).write_text(str(size_bytes) if memory.version == 1 else "0")

    def cpu_limit(self) -> float | None:
        """Cores the node may use now, or None without a limit (or without a group)."""
        cpu = self.hierarchies.cpu
        if cpu is None:
            return None
        folder = self._folder(cpu)
        if cpu.version == 2:
            quota, period = (files.text(folder / "cpu.max").split() or ["max", "1"])[:2]
        else:
            quota = files.text(folder / "cpu.cfs_quota_us") or "-1"
            period = files.text(folder / "cpu.cfs_period_us") or "1"
        return None if quota in ("max", "-1") else int(quota) / int(period)

    def freeze(self, timeout_s: float = 5.0) -> None:
        """Stop every process of the node where it stands. Raises HomelabError when the kernel does not manage."""
        self._set_frozen("FROZEN", "1")
        if not procfs.until(self.is_frozen, timeout_s):
            self.thaw()
            raise HomelabError(f'node "{self.node}" did not freeze within {timeout_s:g} s', where=self.node, hint="try again")

    def thaw(self) -> None:
        """Let the processes go on."""
        self._set_frozen("THAWED", "0")

    def is_frozen(self) -> bool:
        """True when all processes of the node stand still."""
        freezer = self.hierarchies.freezer
        if freezer is None:
            return False
        folder = self._folder(freezer)
        if freezer.version == 2:
            return "frozen 1" in files.text(folder / "cgroup.events").splitlines()
        return files.text(folder / "freezer.state") == "FROZEN"

    def _set_frozen(self, state_v1: str, state_v2: str) -> None:
        freezer = self.hierarchies.freezer
        if freezer is None:
            raise HomelabError("this machine has no cgroup freezer that we may write", where=self.node, hint="run the lab as root")
        folder = self._folder(freezer)
        if freezer.version == 2:
            (folder / "cgroup.freeze").write_text(state_v2)
        else:
            (folder / "freezer.state").write_text(state_v1)

    def _cpu_folder(self) -> Path:
        cpu = self.hierarchies.cpu
        folder = self._folder(cpu) if cpu else None
        if folder is None or not folder.is_dir():
            raise HomelabError(
                "a CPU limit needs a cgroup tree with the cpu controller that we may write, and there is none",
                where=self.node,
                hint="start the lab as root (sudo), or do without --cpu and throttle",
            )
        return folder


def lab_folder(lab: str) -> str:
    """The name of a lab's own group, the parent of its nodes' groups."""
    return f"homelab-{lab}"


def leftovers(lab: str, hierarchies: Hierarchies) -> list[Path]:
    """The lab's groups that exist, children first."""
    folders: list[Path] = []
    for tree in dict.fromkeys(tree for tree in (hierarchies.cpu, hierarchies.freezer, hierarchies.memory) if tree):
        top = tree.path / lab_folder(lab)
        if top.is_dir():
            folders += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return folders


def members(lab: str, hierarchies: Hierarchies) -> set[int]:
    """Every process in any of the lab's groups."""
    return {pid for folder in leftovers(lab, hierarchies) for pid in _members(folder)}


def remove(lab: str, hierarchies: Hierarchies, timeout_s: float = 5.0) -> None:
    """Kill what is left in the lab's groups and remove them; what cannot be removed stays for `leftovers` to report."""

    def gone() -> bool:
        for folder in leftovers(lab, hierarchies):
            # A frozen process cannot die.
            for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                if (folder / name).exists():
                    with contextlib.suppress(OSError):
                        (folder / name).write_text(value)
            procfs.send(_members(folder), signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not leftovers(lab, hierarchies)

    procfs.until(gone, timeout_s)


def _enable(controller: str, folder: Path) -> None:
    if controller in files.text(folder / "cgroup.subtree_control").split():
        return
    try:
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as error:
        why = "it holds processes itself" if error.errno == errno.EBUSY else (error.strerror or str(error))
        raise HomelabError(
            f"the {controller} controller cannot be handed out below {folder}: {why}",
            where=str(folder / "cgroup.subtree_control"),
            hint="start the lab on the machine itself (not in a container), or without --cpu and --memory",
        ) from error


def _members(folder: Path) -> set[int]:
    # A process of a foreign PID namespace reads as 0, and kill(0) would hit our own process group.
    return {int(pid) for pid in files.text(folder / "cgroup.procs").split()} - {0}
