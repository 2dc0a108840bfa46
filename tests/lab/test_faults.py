"""Faults are what they are called: looked at from outside, by processes and connections."""

from __future__ import annotations

import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.lab import Lab, cgroup, faults
from tests.lab.conftest import output, processes_mentioning, ssh, wait_until

pytestmark = pytest.mark.timeout(90)
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# A stand-in for torchrun and its workers: LOCAL_RANK is in the environment of the workers only, and their children inherit it.
FAKE_TORCHRUN = """
import os, subprocess, sys, time
worker = "import os, sys, time; os.fork(); open(sys.argv[1] + str(os.getpid()), 'w').close(); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", worker, sys.argv[1]], env={**os.environ, "LOCAL_RANK": str(rank), "RANK": str(rank)})
    for rank in (0, 1)
]
time.sleep(600)
"""


def detached(lab: Lab, node: str, program: str, *, environment: str = "") -> None:
    """Start a program on a node as a careful user would: a new session, no terminal, not even our environment left."""
    output(lab, node, f'setsid env -i PATH="$PATH" {environment} {program} >/dev/null 2>&1 </dev/null & exit 0')


def counting(lab: Lab, node: str) -> Path:
    """Start a detached process that writes a higher number every 20 ms; return its file."""
    file = Path(lab.state.node(node).home) / f"count-{time.monotonic_ns()}"
    program = "import sys,time\nfor n in range(100000): open(sys.argv[1],'w').write(str(n)); time.sleep(0.02)"
    detached(lab, node, f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {shlex.quote(str(file))}")
    wait_until(lambda: file.exists() and number(file) > 2)
    return file


def number(file: Path) -> int:
    """The number in the file; 0 while it is being written."""
    return int(file.read_text() or 0)


def is_growing(file: Path) -> bool:
    """True when the number changes within half a second."""
    before = number(file)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        if number(file) > before:
            return True
        time.sleep(0.02)
    return False


def test_power_cut_takes_detached_processes_along(lab: Lab) -> None:
    file = counting(lab, "node2")
    untouched = counting(lab, "node1")
    boot = {name: output(lab, name, f"cat {BOOT_ID}") for name in ("node1", "node2")}
    assert processes_mentioning(str(file))
    lab.fault("node2", "power-cut")
    assert not processes_mentioning(str(file))
    assert not lab.processes_of("node2")
    assert ssh(lab, "node2", "true").returncode == 255
    assert is_growing(untouched)
    state = {node["name"]: (node["power"], node["ssh"]) for node in lab.status()["nodes"]}
    assert state == {"node1": ("on", True), "node2": ("off", False)}
    with pytest.raises(HomelabError, match="no power"):
        lab.fault("node2", "freeze")
    lab.fault("node2", "power-on")
    assert output(lab, "node2", f"ls {shlex.quote(str(file))}") == str(file)  # same home, same host key
    if lab.state.backend == "namespaces":  # on the loopback there is but the machine's own
        after = {name: output(lab, name, f"cat {BOOT_ID}") for name in boot}
        assert boot["node1"] == after["node1"] != boot["node2"] != after["node2"], "a boot of its own, and another after the power cut"
    with pytest.raises(HomelabError, match="running already"):
        lab.fault("node2", "power-on")


def test_frozen_means_that_nothing_moves(lab: Lab) -> None:
    file = counting(lab, "node1")
    lab.fault("node1", "freeze")
    assert not is_growing(file)
    assert [node["frozen"] for node in lab.status()["nodes"]] == [True, False]
    assert output(lab, "node2", "echo well") == "well"
    lab.fault("node1", "thaw")
    assert is_growing(file)
    assert output(lab, "node1", "echo well again") == "well again"


def test_a_frozen_node_can_lose_its_power(lab: Lab) -> None:
    file = counting(lab, "node2")
    lab.fault("node2", "freeze")
    lab.fault("node2", "power-cut")
    assert not processes_mentioning(str(file))
    lab.fault("node2", "power-on")
    assert not lab.status()["nodes"][1]["frozen"]


def test_kill_worker_kills_one_worker_and_not_torchrun(lab: Lab) -> None:
    with pytest.raises(HomelabError, match="no training process"):
        lab.fault("node1", "kill-worker")
    marks = Path(lab.nodes[0].home) / f"worker-{time.monotonic_ns()}-"
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(FAKE_TORCHRUN)} {shlex.quote(str(marks))}"
    detached(lab, "node1", program, environment="HOMELAB_RUN=practice")
    wait_until(lambda: len(list(marks.parent.glob(f"{marks.name}*"))) == 4)
    before = lab.processes_of_run("practice")
    assert len(before["node1"]) == 5  # torchrun, two workers, a child of each
    assert before["node2"] == []
    assert lab.processes_of_run("another") == {"node1": [], "node2": []}
    assert lab.status()["nodes"][0]["runs"] == {"practice": 5}
    environments = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in before["node1"]}
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in before["node1"]}
    (torchrun,) = [pid for pid in before["node1"] if not any(e.startswith("LOCAL_RANK") for e in environments[pid])]
    (first,) = [pid for pid in before["node1"] if parents[pid] == torchrun and "LOCAL_RANK=0" in environments[pid]]
    lab.fault("node1", "kill-worker")
    wait_until(lambda: first not in lab.processes_of_run("practice")["node1"])
    assert set(before["node1"]) - set(lab.processes_of_run("practice")["node1"]) == {first}


def test_throttle_limits_the_cpu(lab: Lab) -> None:
    if cgroup.find_hierarchies().cpu is None:
        with pytest.raises(HomelabError, match="cpu controller"):
            lab.fault("node1", "throttle=0.2")
        return
    busy = "import time\nw=time.monotonic(); c=time.process_time()\nwhile time.monotonic()-w<1.5: pass\nprint((time.process_time()-c)/(time.monotonic()-w))"
    lab.fault("node1", "throttle=0.2")
    assert lab.status()["nodes"][0]["cpu_cores"] == pytest.approx(0.2)
    assert float(output(lab, "node1", f"'{sys.executable}' -c '{busy}'")) < 0.25
    lab.fault("node1", "throttle=off")
    assert lab.status()["nodes"][0]["cpu_cores"] is None


def test_faults_at_the_same_time_wait_for_each_other(lab: Lab) -> None:
    with ThreadPoolExecutor() as pool:
        for fault in ("power-cut", "power-on"):
            list(pool.map(lambda node, fault=fault: Lab.open(lab.folder).fault(node, fault), ["node1", "node2"]))
    # Its own look at sshd waits a moment only: on a busy machine it may have to look again.
    wait_until(lambda: [node["ssh"] for node in lab.status()["nodes"]] == [True, True], 30)


def test_a_loopback_node_has_no_cable(tmp_path: Path) -> None:
    with Lab.up(tmp_path / "lab", nodes=1, backend="loopback") as lab, pytest.raises(HomelabError, match="namespaces backend"):
        lab.fault("node1", "pull-cable")


def test_unknown_nodes_and_faults_are_answered_with_what_there_is(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'no node "nod1".*Did you mean "node1"') as error:
        lab.fault("nod1", "freeze")
    assert "node1, node2" in error.value.hint
    with pytest.raises(InputError, match='Did you mean "power-cut"') as error:
        lab.fault("node1", "powercut")
    assert all(name in error.value.hint for name in faults.FAULTS)
    with pytest.raises(InputError, match="there is no lab here"):
        Lab.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("freeze", faults.Fault("freeze")), ("throttle=0.5", faults.Fault("throttle", 0.5)), ("throttle=off", faults.Fault("throttle"))],
)
def test_faults_are_parsed(text: str, wanted: faults.Fault) -> None:
    assert faults.parse(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "throttle",
        "throttle=",
        "throttle=fast",
        "throttle=0",
        "throttle=-1",
        "throttle=nan",
        "throttle=inf",
        "throttle=1e9",
        "freeze=1",
        "",
        "=",
    ],
)
def test_impossible_faults_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        faults.parse(text)
