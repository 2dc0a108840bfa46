"""One lab per backend for the tests that leave nodes as they found them; and ssh, the real client."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.lab import Lab, cgroup, procfs
from homelab.lab.namespaces import check_machine


@functools.cache
def namespaces_missing() -> str:
    """Why the namespaces backend cannot be tested here; empty when it can."""
    try:
        check_machine(cgroup.find_hierarchies(), is_limited=True)
    except HomelabError as error:
        return error.message
    return ""


NAMESPACES = pytest.param(
    "namespaces", marks=[pytest.mark.namespaces, pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing() or "-")]
)
BACKENDS = ["loopback", NAMESPACES]
needs_namespaces = pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing() or "-")


@pytest.fixture(scope="module", params=BACKENDS)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes, with each backend this machine can do. The folder has a space in its name on purpose."""
    with Lab.up(tmp_path_factory.mktemp("my lab") / "lab", nodes=2, backend=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes of the namespaces backend."""
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    with Lab.up(tmp_path_factory.mktemp("isolated") / "lab", nodes=2, backend="namespaces") as started:
        yield started


def ssh(lab: Lab, node: str, command: str, *, text: str = "", timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run a shell command on a node with the OpenSSH client; `text` is its stdin."""
    return subprocess.run([*lab.ssh_command(node), command], input=text, capture_output=True, text=True, timeout=timeout_s, check=False)


def output(lab: Lab, node: str, command: str, *, text: str = "") -> str:
    """What a command that must succeed prints."""
    done = ssh(lab, node, command, text=text)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until true; fail the test when that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.02)


def traces() -> set[str]:
    """Everything of this machine that a lab adds to, one line each."""
    cgroups = [*Path("/sys/fs/cgroup").glob("*/homelab-*"), *Path("/sys/fs/cgroup").glob("homelab-*")]
    cgroups = [path for path in cgroups if not path.name.startswith("homelab-tests-")]  # costs.py counts other tests with these
    return {
        *(f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        *(f"interface {name}" for name in os.listdir("/sys/class/net")),
        *(f"namespace {name}" for name in (os.listdir("/run/netns") if Path("/run/netns").exists() else ())),
        *(f"route {line}" for line in Path("/proc/net/route").read_text().splitlines()),
        *(f"cgroup {path}" for path in cgroups),
    }


def left_since(before: set[str], folder: Path, timeout_s: float = 10.0) -> set[str]:
    """What stays and was not there `before`. Labs that somebody else runs on this machine, outside `folder`, do not count.

    Whose a trace is only its processes say, and a lab that comes or goes has none for a moment: hence the time.
    """
    deadline_s = time.monotonic() + timeout_s
    while (left := _left_since(before, folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _left_since(before: set[str], folder: Path) -> set[str]:
    foreign = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            environment = procfs.environment(int(entry))
            if not environment.get("HOMELAB_LAB_NODE", str(folder)).startswith(str(folder)):
                foreign.add(environment["HOMELAB_LAB_ID"])
    if foreign:
        before = before | {"mount /run/netns"}
    return {line for line in traces() - before if not any(lab in line for lab in foreign)}


def processes_mentioning(text: str) -> set[int]:
    """Processes with `text` in their environment or command line, without this one."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        for file in ("environ", "cmdline"):
            try:
                if text.encode() in Path("/proc", entry, file).read_bytes():
                    found.add(int(entry))
            except OSError:
                continue
    return found
