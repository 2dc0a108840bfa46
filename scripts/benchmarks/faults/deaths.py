"""Faults of processes and machines: something is killed, frozen or without power."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.faults.scene import Case, Scene

from homelab.lab import procfs

CUT_S = 60.0


def worker_killed(scene: Scene) -> None:
    """kill -9 of one training process."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "kill-worker")
    scene.finish()


def torchrun_killed(scene: Scene) -> None:
    """kill -9 of torchrun; its worker is left an orphan."""
    scene.train()
    pids = scene.processes(scene.node(), "torch.distributed.run")
    with scene.fault():
        procfs.send(pids, signal.SIGKILL)
    scene.finish()


def agent_killed(scene: Scene) -> None:
    """kill -9 of the agent that waits for torchrun; the training itself is well, and must not be disturbed."""
    scene.train()
    pids = scene.processes(scene.node(), "watch")
    with scene.fault():
        procfs.send(pids, signal.SIGKILL)
    scene.finish()


def power_cut(scene: Scene) -> None:
    """A node loses its power and does not get it back."""
    scene.train()
    node = scene.node(head=False)
    with scene.fault():
        scene.lab.fault(node, "power-cut")
    scene.finish()


def head_power_cut(scene: Scene) -> None:
    """The node with rank 0 and the rendezvous loses its power and does not get it back."""
    scene.train()
    node = scene.node(head=True)
    with scene.fault():
        scene.lab.fault(node, "power-cut")
    scene.finish()


def power_cut_while_loading(scene: Scene) -> None:
    """A node without power before there was a step: its peers may load for long, and wait for it only then."""
    scene.launch()
    node = scene.node()
    scene.until(lambda: bool(scene.run.heartbeat(1)), "first word of a rank")
    time.sleep(scene.draw.uniform(0.0, 3.0))
    with scene.fault():
        scene.lab.fault(node, "power-cut")
    scene.finish()


def frozen_worker(scene: Scene) -> None:
    """SIGSTOP to one training process, without SIGCONT."""
    scene.train()
    node = scene.node()
    pids = sorted({*scene.processes(node, "homelab.worker")} - {*scene.processes(node, "torch.distributed.run")})
    with scene.fault():
        procfs.send(pids, signal.SIGSTOP)
    scene.finish()


def frozen_node(scene: Scene) -> None:
    """All processes of a node stand still for a minute; its kernel still answers for its connections."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "freeze")
    scene.until(lambda: scene.said("continues after step") or time.time() > scene.fault_at + CUT_S, "recovery")
    _wait_for_the_minute(scene)
    scene.lab.fault(node, "thaw")
    scene.finish()


def two_at_once(scene: Scene) -> None:
    """A worker killed on one node, and within a second another node without power."""
    scene.train()
    first, second = scene.draw.sample(scene.run.node_names(1), 2)
    scene.victim = f"{first}, {second}"
    with scene.fault():
        scene.lab.fault(first, "kill-worker")
        time.sleep(scene.draw.uniform(0.0, 0.5))
        scene.lab.fault(second, "power-cut")
    scene.finish()


def during_recovery(scene: Scene) -> None:
    """A worker is killed; while the recovery is under way, another node loses power."""
    scene.train()
    first, second = scene.draw.sample(scene.run.node_names(1), 2)
    scene.victim = f"{first}, {second}"
    with scene.fault():
        scene.lab.fault(first, "kill-worker")
    scene.until(lambda: scene.said("trouble: "), "first word of the supervisor")
    time.sleep(scene.draw.uniform(0.0, 6.0))
    scene.lab.fault(second, "power-cut")
    scene.finish()


def everything_killed(scene: Scene) -> None:
    """kill -9 of all processes of the run on all nodes and of the supervisor at once; then `homelab recover`."""
    scene.train()
    scene.victim = "all"
    with scene.fault():
        scene.run.kill_supervisor()
        for pids in scene.lab.processes_of_run(scene.run.name).values():
            procfs.send(pids, signal.SIGKILL)
    scene.ground.desk.homelab("recover", scene.run.name, timeout_s=120)
    scene.finish()


def supervisor_killed(scene: Scene) -> None:
    """kill -9 of the supervisor: the run goes on; while nobody looks a worker dies; a new supervisor finds it and recovers."""
    scene.train()
    scene.run.kill_supervisor()
    scene.until_step(3)
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "kill-worker")
    time.sleep(2.0)
    with _supervisor(scene):
        scene.finish()


def supervisor_killed_recovering(scene: Scene) -> None:
    """A worker dies; the supervisor is killed at a random moment of the recovery, and started again."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "kill-worker")
    scene.until(lambda: scene.said("trouble: "), "first word of the supervisor")
    time.sleep(scene.draw.uniform(0.0, 3.0))
    scene.run.kill_supervisor()
    time.sleep(1.0)
    with _supervisor(scene):
        scene.finish()


@contextmanager
def _supervisor(scene: Scene) -> Iterator[None]:
    """`homelab supervise` as a person would start it."""
    process = scene.ground.desk.spawn("supervise", scene.run.name)
    try:
        scene.until(lambda: scene.run.supervisor().get("pid") == process.pid, "new supervisor", 30)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def supervisor_twice(scene: Scene) -> None:
    """A second supervisor is started: it says so and leaves; a failure is recovered once."""
    scene.train()
    first = scene.run.supervisor()["pid"]
    output = scene.ground.desk.homelab("supervise", scene.run.name, timeout_s=60).stdout
    assert "has a supervisor" in output, output
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "kill-worker")
    scene.finish()
    assert scene.run.supervisor()["pid"] == first, "another supervisor has taken over"


def comes_back(scene: Scene) -> None:
    """A node loses power and gets it back after ten seconds: the run goes on without it, and takes it in again later."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "power-cut")
    scene.until(lambda: scene.run.attempt() > 1, "attempt 2", 90)
    time.sleep(max(0.0, scene.fault_at + 10 - time.time()))
    scene.lab.fault(node, "power-on")
    scene.finish()
    names = scene.run.node_names(scene.run.attempt())
    assert node in names, f"{node} was never taken back: the last attempt has {', '.join(names)}"


def too_few(scene: Scene) -> None:
    """The recipe wants three nodes; one loses its power: the run waits, and goes on when it is back."""
    scene.ground.desk.write("three.toml", scene.ground.recipe(more="[recovery]\nmin_nodes = 3\n"))
    scene.train("three.toml")
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "power-cut")
    scene.until(lambda: scene.said("min_nodes is 3"), "word that it waits", 60)
    assert scene.run.attempt() == 1, "it went on with two nodes"
    scene.lab.fault(node, "power-on")
    scene.finish()


def _wait_for_the_minute(scene: Scene) -> None:
    time.sleep(max(0.0, scene.fault_at + CUT_S - time.time()))


CASES = (
    Case("worker-killed", "kill -9 of a worker", "death", worker_killed, restarts=(1, 1)),
    Case("torchrun-killed", "kill -9 of torchrun", "death", torchrun_killed, restarts=(1, 1)),
    Case("agent-killed", "kill -9 of the agent", "quiet", agent_killed, restarts=(0, 1)),
    Case("power-cut", "a node loses its power", "cut", power_cut, restarts=(1, 1)),
    Case("head-power-cut", "the head loses its power", "cut", head_power_cut, restarts=(1, 1)),
    Case("loading", "a node loses its power while ranks load", "cut", power_cut_while_loading, restarts=(1, 1)),
    Case("worker-frozen", "a worker is stopped by SIGSTOP", "cut", frozen_worker, restarts=(1, 1)),
    Case("node-frozen", "a whole node stands still for 60 s", "cut", frozen_node, restarts=(1, 2)),
    Case("two-at-once", "a worker and another node within a second", "other", two_at_once, restarts=(1, 2)),
    Case("during-recovery", "another node during a recovery", "other", during_recovery, restarts=(1, 2)),
    Case("supervisor-killed", "the supervisor is killed, then a worker", "other", supervisor_killed, restarts=(1, 1)),
    Case("recovery-killed", "the supervisor is killed while it recovers", "other", supervisor_killed_recovering, restarts=(1, 2)),
    Case("supervisor-twice", "a second supervisor is started", "other", supervisor_twice, restarts=(1, 1)),
    Case("everything-killed", "everything at once, then homelab recover", "other", everything_killed, restarts=(1, 1)),
    Case("too-few", "a node is lost without which too few are left", "other", too_few, restarts=(1, 1)),
    Case("comes-back", "a node comes back after a power cut", "cut", comes_back, restarts=(2, 2)),
)
