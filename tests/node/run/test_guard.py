"""A node that has lost the controller and its peers lets go of its card; one that has lost only one of them does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.node import paths
from homelab.node.run import isolation_guard, status_stream
from homelab.node.system import processes
from homelab.shared.protocol.rank_messages import RankStatus
from scripts.practice.desk import wait_until
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(60)

RUN, NODE = f"2026-guard-{os.getpid()}", "node1"
RANKS = [{"rank": number, "node": name, "local_rank": 0} for number, name in enumerate((NODE, "node2"))]
NODES = [{"name": name, "lan_address": "127.0.0.1"} for name in (NODE, "node2")]


def rank(phase: str = "training", still_s: float = 100.0) -> RankStatus:
    return RankStatus(phase=phase, still_s=still_s, step=7)


@pytest.mark.parametrize(
    ("unheard_s", "ranks", "slowest_step_s", "lets_go"),
    [
        (100.0, [rank()], 1.0, True),
        (59.0, [rank()], 1.0, False),  # somebody follows it
        (1e6, [rank(still_s=3.0)], 1.0, False),  # the steps go on without anybody looking
        (100.0, [rank(still_s=100.0)], 11.0, False),  # its steps are as long as that
        (1e6, [rank(still_s=200.0)], 20.0, False),  # a lid is closed, and the others wait for a node that is slowed to a tenth
        (1e6, [rank(still_s=601.0)], 20.0, True),
        (100.0, [rank(still_s=100.0)], None, False),  # kernels may still be compiled
        (700.0, [rank(still_s=601.0)], None, True),
        (100.0, [rank(), rank("loading")], 1.0, False),
        (2000.0, [rank("evaluating", 1801.0)], 1.0, True),
        (1e6, [rank("absent", 1e6)], None, False),  # a program of the user's own: nothing is known of its steps
        (1e6, [rank("done", 1e6)], 1.0, False),
        (1e6, [], 1.0, False),
    ],
)
def test_who_is_alone(unheard_s: float, ranks: list[RankStatus], slowest_step_s: float | None, lets_go: bool) -> None:
    assert (isolation_guard.reason(unheard_s, dict(enumerate(ranks)), slowest_step_s) is not None) is lets_go


@pytest.mark.parametrize(
    ("time_of_plan", "lets_go"), [({"step_s": 275.0}, False), ({"step_s": 1.0}, True), ({"step_s": "soon"}, True), (None, True)]
)
def test_a_first_step_has_the_time_that_the_plan_expects_of_it(tmp_path: Path, time_of_plan: Any, lets_go: bool) -> None:
    """Alone for a quarter of an hour, in the first step of a 7B model on an old card."""
    folder = Path(paths.attempt_dir(paths.run_dir(str(tmp_path), RUN), 1))
    (folder / "ranks" / "0").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"nodes": NODES, "ranks": RANKS, "time": time_of_plan}))
    (folder / "ranks" / "0" / "heartbeat.json").write_text(json.dumps({"phase": "training", "step": 0, "time": 1.0}))
    alone = isolation_guard.Guard(str(tmp_path), RUN, 1, NODE)
    alone._began_s = 0.0
    assert alone.look(1000.0) is None
    assert (alone.look(1900.0) is not None) is lets_go


def test_the_word_of_a_follower_counts_and_a_damaged_file_does_not(tmp_path: Path) -> None:
    assert status_stream.last_heard_s(str(tmp_path)) == 0.0
    status_stream.hear(str(tmp_path))
    assert 0 <= time.monotonic() - status_stream.last_heard_s(str(tmp_path)) < 5
    (tmp_path / "heard").write_text("soon")
    assert status_stream.last_heard_s(str(tmp_path)) == 0.0


PROGRAM = """
import itertools, json, os, sys, time
home = os.path.join(os.environ["HOMELAB_RUN_DIR"], "attempts", "1", "ranks", "0")
os.makedirs(home, exist_ok=True)
still = os.path.join(os.environ["HOMELAB_RUN_DIR"], "still")
for step in itertools.count(1):
    with open(os.path.join(home, "beat"), "w") as stream:
        json.dump({"time": time.time(), "pid": os.getpid(), "phase": "training", "step": step}, stream)
    os.replace(os.path.join(home, "beat"), os.path.join(home, "heartbeat.json"))
    time.sleep(0.3)
    if step >= 5 and os.path.exists(still):
        time.sleep(600)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rank that does steps until the test writes `still`, and then waits for ever; its watcher counts a second as a minute."""
    folder = Path(paths.run_dir(str(tmp_path), RUN))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from homelab.node.run import isolation_guard\nisolation_guard.ALONE_S = 1.5\nisolation_guard.LOOK_S = 0.1\nisolation_guard.STEP_FACTOR = 2.0\n"
    )
    root = str(Path(isolation_guard.__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{root}")
    folder.mkdir(parents=True)
    ask_node("start", {
        "workdir": str(tmp_path), "run": RUN, "attempt": 1, "node": NODE, "run_json": {}, "environment": {},
        "plan_json": {"nodes": NODES, "ranks": RANKS}, "command": [sys.executable, "-c", PROGRAM],
    })  # fmt: skip
    yield folder / "attempts" / "1" / "nodes" / NODE
    ask_node("stop", {"workdir": str(tmp_path), "run": RUN, "node": NODE, "grace_s": 0.5})


def test_a_node_that_lost_everybody_ends_its_ranks_and_says_why(started: Path) -> None:
    pid = json.loads((started / "agent.json").read_text())["torchrun_pid"]
    (started.parents[3] / "still").touch()
    wait_until(lambda: (started / "exit.json").exists(), 30)
    ended = json.loads((started / "exit.json").read_text())
    assert "the other nodes are lost" in ended["alone"] and not ended["stopped"]
    assert not processes.is_alive(pid)
    assert "the other nodes are lost" in (started / "agent.log").read_text()


def test_a_node_that_is_followed_waits(started: Path, tmp_path: Path) -> None:
    """The follower's own process, fed with the signs of life that a supervisor sends; then the supervisor is gone."""
    request = {"workdir": str(tmp_path), "run": RUN, "attempt": 1, "node": NODE}
    follower = subprocess.Popen(
        [sys.executable, "-c", f"from tests.fakes import ask_node; ask_node('follow', {request!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert follower.stdin is not None
    try:

        def is_heard() -> bool:
            assert follower.stdin is not None
            follower.stdin.write(b"\n")
            follower.stdin.flush()
            return status_stream.last_heard_s(str(started)) > 0

        wait_until(is_heard, 30)
        (started.parents[3] / "still").touch()
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            follower.stdin.write(b"\n")
            follower.stdin.flush()
            assert not (started / "exit.json").exists()
            time.sleep(0.1)
        os.kill(follower.pid, signal.SIGSTOP)
        wait_until(lambda: (started / "exit.json").exists(), 30)
    finally:
        follower.kill()
        follower.communicate()


def test_the_machine_is_kept_awake_as_long_as_the_attempt_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-inhibit stands for logind, which practice nodes do not have: it writes down what it was asked and runs its command."""
    program = tmp_path / "systemd-inhibit"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ntouch {tmp_path}/held\ncat\nrm {tmp_path}/held\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with isolation_guard.awake(RUN):
        wait_until(lambda: (tmp_path / "held").exists(), 10)
        assert "--what=sleep:idle:handle-lid-switch" in (tmp_path / "asked").read_text()
    wait_until(lambda: not (tmp_path / "held").exists(), 10)
    code = "import os\nfrom homelab.node.run import isolation_guard\nwith isolation_guard.awake('x'):\n"
    code += f"  while not os.path.exists({str(tmp_path / 'held')!r}): pass\n  os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == -signal.SIGKILL
    wait_until(lambda: not (tmp_path / "held").exists(), 10)


def test_an_attempt_that_others_have_replaced_is_not_started(tmp_path: Path) -> None:
    folder = Path(paths.run_dir(str(tmp_path), RUN))
    (folder / "attempts" / "3").mkdir(parents=True)
    (folder / "attempts" / "3" / "plan.json").write_text('{"ranks": []}')
    with pytest.raises(ValueError, match="this node knows attempt 3"):
        ask_node(
            "start",
            {
                "workdir": str(tmp_path),
                "run": RUN,
                "attempt": 2,
                "node": NODE,
                "run_json": {},
                "plan_json": {},
                "command": [],
                "environment": {},
            },
        )
    assert not (folder / "attempts" / "2").exists()


@pytest.mark.parametrize(
    ("seen", "lets_go_after_s"),
    [
        # A first step of 20 s made the limit ten minutes: a node that had lost everybody held its card as long.
        (((0.0, 0), (20.0, 1), (21.0, 2), (24.0, 3)), 90.0),
        # Ten steps within one look: they were the first that ended, so nothing was known, and it was ten minutes again.
        (((0.0, 0), (2.0, 10)), 60.0),
        (((0.0, 0), (5.0, 1)), 150.0),
        (((0.0, 0),), 600.0),
    ],
)
def test_a_node_alone_waits_for_thirty_of_its_warm_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[tuple[float, int], ...], lets_go_after_s: float
) -> None:
    guard = isolation_guard.Guard(str(tmp_path), "r", 1, "node1")
    guard._began_s = 0.0
    last_s, _ = seen[-1]
    now = RankStatus(phase="training")

    def look(now_s: float) -> Any:
        return SimpleNamespace(ranks={0: now})

    monkeypatch.setattr(guard._follower, "look", look)
    for now_s, step in seen:
        now = now.replace(step=step)
        assert guard.look(now_s) is None
    now = now.replace(still_s=lets_go_after_s - 1.0)
    assert guard.look(last_s + lets_go_after_s - 1.0) is None
    now = now.replace(still_s=lets_go_after_s)
    assert guard.look(last_s + lets_go_after_s) is not None
