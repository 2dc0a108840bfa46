"""Who holds a run may be stopped by a signal (SIGSTOP, Ctrl-Z): every command beside it says so, with the command that lets it go on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.errors import InputError
from homelab.controller.dashboard import live
from homelab.controller.facts.reading import read
from homelab.controller.features.recover import recover_run
from homelab.controller.features.status import monitor
from homelab.controller.features.stop import stop
from homelab.controller.run import process_owner, stopped_holder, supervisor_record
from homelab.controller.run.paths import RunPaths
from homelab.node.paths import supervised_dir
from homelab.node.run import supervisor_host
from homelab.shared.protocol.run_messages import SupervisorReply
from scripts.practice.desk import REPOSITORY, wait_until
from tests import builders
from tests.controller.features.status.test_looking import NOBODY, PLAN, Nodes, fleet, nodes, paths
from tests.fakes import FakeFleet

__all__ = ["fleet", "nodes", "paths"]
pytestmark = pytest.mark.timeout(60)

HOLDER = """
import json, os, sys, time
from pathlib import Path
from homelab.controller.run import store, supervisor_lock
from homelab.controller.run.paths import RunPaths

paths = RunPaths(Path(sys.argv[1]))
with supervisor_lock.held(paths) as is_ours:
    store.write_json(paths.supervisor_json, {"pid": os.getpid(), "doing": sys.argv[2], "why": "rank 1 is frozen", "attempt": 1})
    print(is_ours, flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["recovering", "watching", supervisor_record.DOING])
def holder(paths: RunPaths, request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    """A real process that has the lock of the run, and that a signal has stopped."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(paths.root), request.param],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with closing(process.stdout):
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_owner.is_stopped(process.pid), 10)
        yield psutil.Process(process.pid)
        process.kill()
        process.wait()


def test_who_looks_is_told_and_who_waits_does_not_wait_in_silence(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, holder: psutil.Process
) -> None:
    nodes.end(stopped=False)
    watcher, said = monitor.Watcher(fleet, paths), io.StringIO()
    snapshot = watcher.look()
    word = f"kill -CONT {holder.pid}"
    assert not snapshot.is_over and word in str(snapshot.notes[-1]) and "is stopped (SIGSTOP" in str(snapshot.notes[-1])
    assert word in snapshot.model_dump(mode="json")["stopped_owner"]
    looks = 0

    def collect() -> Any:
        nonlocal looks
        looks += 1
        if looks == 3:
            holder.kill()  # the lock falls, and nobody goes on with it
            holder.wait()
        return watcher.look().model_copy(update={"is_over": looks == 3})

    live.watch(collect, Console(file=said, width=200), refresh_s=0.0)
    lines = said.getvalue().splitlines()
    assert word in lines[0] and word not in lines[-1] and len(lines) == 2, "a line when it changes"


def test_a_recovery_by_hand_beside_it_is_refused_with_both_ways(paths: RunPaths, holder: psutil.Process) -> None:
    with (
        pytest.raises(InputError, match=rf"process {holder.pid} on this machine, is stopped") as caught,
        supervisor_record.exclusive(paths),
    ):
        pass
    assert f"kill -CONT {holder.pid}" in str(caught.value.hint) and f"kill -KILL {holder.pid}" in str(caught.value.hint)
    subprocess.run(["kill", "-KILL", str(holder.pid)], check=True)  # a SIGTERM would wait with it
    holder.wait()
    with supervisor_record.exclusive(paths):
        pass


def test_a_stop_beside_it_ends_the_run_and_says_that_it_cannot_see_that(fleet: FakeFleet, paths: RunPaths, holder: psutil.Process) -> None:
    fleet.answer("stop", {"asked": 1, "killed": 0, "left": [], "as_nodes": []})
    outcome = stop.stop(fleet, paths, lambda text: None)
    assert (
        outcome.exit_code == 0
        and f"it ends by itself after kill -CONT {holder.pid}" in "\n".join(outcome.lines())
        and outcome.as_dict()["held"]
    )


def test_a_supervisor_that_is_at_work_is_none(fleet: FakeFleet, nodes: Nodes, paths: RunPaths, holder: psutil.Process) -> None:
    holder.send_signal(signal.SIGCONT)
    wait_until(lambda: not process_owner.is_stopped(holder.pid), 10)
    nodes.end(stopped=False)
    assert monitor.Watcher(fleet, paths).look().stopped_owner is None


def test_one_on_a_node_is_let_go_on_over_there(fleet: FakeFleet, nodes: Nodes, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = SupervisorReply(alive=True, frozen=True, doing="recovering", pid=77)
    seen = str(stopped_holder.note(fleet.cluster, paths, {"tower": reply}))
    assert seen.startswith("the supervisor, process 77 on tower, is stopped (SIGSTOP): ssh ") and "kill -CONT 77" in seen
    assert stopped_holder.note(fleet.cluster, paths, {"tower": reply.replace(frozen=False)}) is None
    monkeypatch.setattr(remote_supervisor, "at_work", lambda *_: ("tower", reply))
    with pytest.raises(InputError) as caught:
        recover_run._refuse_supervised(fleet, paths)
    assert "kill -CONT 77" in str(caught.value.hint) and "kill -KILL 77" in str(caught.value.hint)


def test_a_node_tells_that_its_supervisor_is_stopped(paths: RunPaths, holder: psutil.Process, tmp_path: Path) -> None:
    place = Path(supervised_dir(str(tmp_path / "node"), paths.name)) / "runs" / paths.name
    place.parent.mkdir(parents=True)
    place.symlink_to(paths.root)
    assert read(SupervisorReply, supervisor_host.state(str(tmp_path / "node"), paths.name)).frozen
    holder.send_signal(signal.SIGCONT)
    wait_until(lambda: not process_owner.is_stopped(holder.pid), 10)
    assert not read(SupervisorReply, supervisor_host.state(str(tmp_path / "node"), paths.name)).frozen


def test_a_command_that_ctrl_z_has_stopped_while_it_had_the_claim(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, holder: psutil.Process, tmp_path: Path
) -> None:
    """Typed in another folder: this one has no lock of it."""
    born = process_owner._born(holder.pid)
    process = {**process_owner.mark(), "pid": holder.pid, "born": born}
    nodes.owner |= {**NOBODY, "claim": {"by": "me", "doing": "recovered by hand", "age_s": 5.0, "process": process}}
    nodes.end(stopped=False)
    other = builders.run_folder(tmp_path / "other runs", recipe=builders.recipe(), plan=PLAN)
    note = str(monitor.Watcher(fleet, other).look().stopped_owner)
    assert (
        note
        == f"the command by which the run is recovered by hand, process {holder.pid} on this machine, is stopped (SIGSTOP or Ctrl-Z): kill -CONT {holder.pid}"
    )
