"""CPU limits and the freezer on both generations of cgroups. The files of v2's cpu controller are stand-ins where the kernel has it in v1."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.lab import cgroup
from homelab.lab.cgroup import Hierarchies, Hierarchy, NodeGroup

pytestmark = pytest.mark.timeout(30)


def mountinfo(tmp_path: Path, *mounts: tuple[Path, str, str]) -> Path:
    """A /proc/self/mountinfo with these mounts: folder, kind, options."""
    file = tmp_path / "mountinfo"
    file.write_text("".join(f"31 23 0:28 / {folder} rw,relatime - {kind} {kind} {options}\n" for folder, kind, options in mounts))
    return file


def tree(folder: Path, **files: str) -> Path:
    """A folder that looks like a cgroup."""
    folder.mkdir(parents=True)
    for name, text in {"cgroup_procs": "", **files}.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_controllers_in_v1(tmp_path: Path) -> None:
    cpu, freezer, unified = tree(tmp_path / "cpu"), tree(tmp_path / "freezer"), tree(tmp_path / "unified", cgroup_controllers="hugetlb\n")
    file = mountinfo(tmp_path, (cpu, "cgroup", "rw,cpu,cpuacct"), (freezer, "cgroup", "rw,freezer"), (unified, "cgroup2", "rw"))
    assert cgroup.find_hierarchies(file) == Hierarchies(Hierarchy(cpu, 1), Hierarchy(freezer, 1))


def test_controllers_in_v2(tmp_path: Path) -> None:
    unified = tree(tmp_path / "unified", cgroup_controllers="cpuset cpu io memory pids\n")
    found = cgroup.find_hierarchies(mountinfo(tmp_path, (unified, "cgroup2", "rw,nsdelegate")))
    assert found == Hierarchies(Hierarchy(unified, 2), Hierarchy(unified, 2), Hierarchy(unified, 2))


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    found = cgroup.find_hierarchies(mountinfo(tmp_path, (tmp_path, "ext4", "rw")))
    assert found == Hierarchies(None, None)
    group = NodeGroup("abc", "node1", found)
    group.create()
    assert (group.folders(), group.cpu_limit(), group.is_frozen()) == ([], None, False)
    with pytest.raises(HomelabError, match="cpu controller"):
        group.limit_cpu(0.5)
    with pytest.raises(HomelabError, match="freezer"):
        group.freeze()


def test_limits_in_v2(tmp_path: Path) -> None:
    unified = tree(tmp_path / "unified", cgroup_controllers="cpu\n", cgroup_subtree_control="cpu\n")
    group = NodeGroup("abc", "node1", Hierarchies(Hierarchy(unified, 2), Hierarchy(unified, 2)))
    lab = tree(unified / "homelab-abc", cgroup_subtree_control="", cpu_weight="100\n")
    group.create()
    assert (lab / "cgroup.subtree_control").read_text() == "+cpu"
    assert (lab / "cpu.weight").read_text() == "100"
    assert group.member_files() == [str(lab / "node1" / "cgroup.procs")]
    group.limit_cpu(0.3)
    assert (lab / "node1" / "cpu.max").read_text() == "6000 20000"
    assert group.cpu_limit() == pytest.approx(0.3)
    group.limit_cpu(None)
    assert (lab / "node1" / "cpu.max").read_text() == "max 20000"
    assert group.cpu_limit() is None


def hierarchies_of_this_machine() -> list[Hierarchies]:
    """What there really is: the usual pair, and v2's freezer, which works without any controller."""
    found = [cgroup.find_hierarchies()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            found.append(Hierarchies(None, Hierarchy(Path(left.split()[4]), 2)))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="writing cgroups needs root")
@pytest.mark.parametrize("hierarchies", hierarchies_of_this_machine(), ids=str)
def test_real_groups(hierarchies: Hierarchies) -> None:
    if hierarchies.freezer is None:
        pytest.skip("this machine has no freezer that we may write")
    lab = f"test{os.getpid()}"
    group = NodeGroup(lab, "node1", hierarchies)
    group.create()
    process = subprocess.Popen(["sleep", "600"])
    try:
        for file in group.member_files():
            Path(file).write_text(str(process.pid))
        assert process.pid in cgroup.members(lab, hierarchies)
        if hierarchies.cpu is not None:
            group.limit_cpu(0.25)
            assert group.cpu_limit() == pytest.approx(0.25)
        group.freeze()
        assert group.is_frozen()
        group.thaw()
        assert not group.is_frozen()
        group.freeze()
    finally:
        cgroup.remove(lab, hierarchies)
        process.wait(timeout=10)
    assert cgroup.leftovers(lab, hierarchies) == []


def test_a_memory_limit_in_v1_counts_swap_where_the_kernel_does(tmp_path: Path) -> None:
    for counts_swap in (False, True):
        memory = tree(tmp_path / f"memory {counts_swap}")
        group = NodeGroup("abc", "node1", Hierarchies(None, None, Hierarchy(memory, 1)))
        folder = memory / "homelab-abc" / "node1"
        folder.mkdir(parents=True)
        for name in ("memory.limit_in_bytes", *(["memory.memsw.limit_in_bytes"] if counts_swap else [])):
            (folder / name).write_text("")
        group.limit_memory(10**9)
        assert (folder / "memory.limit_in_bytes").read_text() == "1000000000"
        assert not counts_swap or (folder / "memory.memsw.limit_in_bytes").read_text() == "1000000000"


def test_a_memory_limit_without_a_controller_is_an_error() -> None:
    with pytest.raises(HomelabError, match="memory limit needs a cgroup tree"):
        NodeGroup("abc", "node1", Hierarchies(None, None)).limit_memory(10**9)
