"""A run that looks after itself: nobody helps, and it ends as the run that nothing happened to; or it says why it cannot."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run import store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, kill_whole, wait_until, wait_until_none_left
from tests.e2e import conftest
from tests.e2e.test_law import assert_lawful

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(300)]

# Every rank works; then one makes a mistake that it will make again.
MISTAKE = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    print({"loss": 1.0}["los"])
dist.barrier()
"""


ENDLESS = """
import time
import torch.distributed as dist

dist.init_process_group("gloo")
for number in range(1000):
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, round {number}", flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def supervised(desk: Desk, lab: Lab) -> Iterator[Desk]:
    """The same desk; what it launches has a supervisor, and none is left behind."""
    yield Desk(desk.folder, lab, supervise=True)
    for folder in (desk.folder / "runs").iterdir():
        supervisor(RunPaths(folder), kill=True)


def supervisor(paths: RunPaths, *, kill: bool = False) -> int | None:
    """The pid of the run's supervisor, None when it has none; `kill`: SIGKILL it, and see its lock fall."""
    pid = store.read_object(paths.supervisor_json).get("pid")
    if pid is None or paths.name not in procfs.command_line(pid):
        return None
    if kill:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not supervisor_lock.is_held(paths), 10)
    return int(pid)


def of_run(desk: Desk, run: Run) -> RunPaths:
    return RunPaths(Path(desk.folder) / "runs" / run.name)


def wait_for_attempt(paths: RunPaths, attempt: int) -> None:
    wait_until(lambda: paths.plan_json(attempt).exists(), 90, lambda: paths.supervisor_log.read_text(errors="replace"))


def wait_for_the_end(paths: RunPaths) -> dict[str, Any]:
    """What the supervisor says when it has nothing more to do."""
    wait_until(
        lambda: store.read_object(paths.supervisor_json)["doing"] in ("ended", "given up"), 150,
        lambda: paths.supervisor_log.read_text(errors="replace"),
    )  # fmt: skip
    return store.read_object(paths.supervisor_json)


def events(paths: RunPaths) -> list[str]:
    return [event["what"] for event in store.read_lines(paths.events_jsonl)]


@pytest.mark.thorough  # test_law.py has a killed worker, quick
def test_a_killed_supervisor_and_a_worker_killed_while_nobody_looks(supervised: Desk, lab: Lab, reference: Run) -> None:
    """(What a supervisor does about the other faults is in test_chaos.py.)"""
    run = supervised.launch("law.toml")
    paths = of_run(supervised, run)
    first = supervisor(paths)
    assert first is not None
    # The supervisor itself is no part of the training, and everything it knows is on the disk.
    run.wait_for_step(1, 13)
    assert supervisor(paths, kill=True) == first
    lab.fault("node2", "kill-worker")
    another = supervised.spawn("supervise", run.name)
    try:
        wait_for_attempt(paths, 2)
        assert "has a supervisor" in supervised.homelab("supervise", run.name).stdout
        ended = wait_for_the_end(paths)
    finally:
        kill_whole(another)
    assert (ended["doing"], ended["why"]) == ("ended", "done"), events(paths)
    assert [(restart["cause"], restart["node"]) for restart in ended["restarts"]] == [("killed", "node2")]
    assert supervised.json("status", run.name)["state"] == "done"
    assert_lawful(run, reference, head="node1")


@pytest.mark.thorough  # chaos has it, too
def test_a_mistake_in_a_script_is_given_up_at_once(supervised: Desk) -> None:
    supervised.write("mistake.py", MISTAKE)
    supervised.write("mistake.toml", '[script]\npath = "mistake.py"\n')
    run = supervised.launch("mistake.toml")
    paths = of_run(supervised, run)
    ended = wait_for_the_end(paths)
    assert ended["doing"] == "given up" and "KeyError: 'los'" in ended["why"], ended
    assert run.attempts() == [1]
    status = supervised.json("status", run.name, code=1)
    assert status["state"] == "failed"
    assert (status["diagnosis"]["cause"], status["diagnosis"]["first_node"]) == ("python-error", "node2")


@pytest.mark.thorough
def test_a_script_goes_on_without_a_node_that_is_gone(supervised: Desk, lab: Lab) -> None:
    """Its own peers would wait for half an hour, and nothing is known of its steps."""
    supervised.write("endless.py", ENDLESS)
    supervised.write("endless.toml", '[script]\npath = "endless.py"\n')
    run = supervised.launch("endless.toml")
    paths = of_run(supervised, run)
    run.wait_for_output(1, "node1", "round 3")
    lab.fault("node3", "power-cut")
    try:
        cut_at = time.monotonic()
        wait_for_attempt(paths, 2)
        assert time.monotonic() - cut_at < 30, "by its peers, not by a time-out"
        run.wait_for_output(2, "node1", "2 ranks, round 3")
        assert any("node3" in what and "cannot reach it any more" in what for what in events(paths)), events(paths)
    finally:
        lab.fault("node3", "power-on")
        supervised.homelab("stop", run.name)


@pytest.mark.thorough
def test_a_stop_from_another_machine_is_a_stop(supervised: Desk, base: Path) -> None:
    """Which has a folder of its own for its runs, and knows no supervisor."""
    run = supervised.launch("law.toml")
    paths = of_run(supervised, run)
    run.wait_for_step(1, 3)
    assert supervised.json("stop", run.name, "--runs-dir", str(base / "elsewhere"))["clean"]
    assert wait_for_the_end(paths)["doing"] == "ended"
    assert run.attempts() == [1]
    wait_until_none_left(supervised.lab)
    assert supervised.json("status", run.name, code=None)["state"] == "stopped"


@pytest.mark.thorough
def test_a_run_whose_supervisor_is_gone_says_so(supervised: Desk, model: Path) -> None:
    supervised.write("long.toml", conftest.recipe(model, length="epochs = 400"))
    run = supervised.launch("long.toml")
    run.wait_for_step(1, 3)
    assert "supervisor" not in " ".join(supervised.json("status", run.name)["notes"])
    pid = supervisor(of_run(supervised, run), kill=True)
    said = supervised.json("status", run.name)["notes"][-1]
    assert f"process {pid} here is gone" in said and said.endswith(f"homelab supervise {run.name}")
    supervised.homelab("stop", run.name)


@pytest.mark.thorough
def test_where_nobody_looks_after_a_run_its_owner_is_told_that_it_stands_still(desk: Desk, lab: Lab) -> None:
    run = desk.launch("law.toml")
    run.wait_for_step(1, 5)
    lab.fault("node3", "pull-cable")
    try:
        wait_until(lambda: "stood still" in " ".join(desk.json("status", run.name, code=None)["notes"]), 40)
        recover = f"homelab recover {run.name}"
        (said,) = desk.json("why", run.name)["without_supervisor"]
        assert "nothing is heard of node3, and all others have stood still" in said, said
        assert said.endswith(f"and no supervisor is working: {recover}")
        told = desk.homelab("why", run.name).stdout
        assert f"no supervisor is working: {recover}\n" in told and told.endswith(f"Next: {recover}\n"), told
    finally:
        lab.fault("node3", "plug-cable")
        desk.homelab("stop", run.name, code=None)
