"""What the agent says of an attempt while it is followed: changes at once, a sign of life each second, ages by its own clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.facts.reading import read
from homelab.node.run import status_stream
from homelab.node.system import boot_clock
from homelab.shared.protocol import files
from homelab.shared.protocol.message import as_json
from scripts.practice.desk import wait_until
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(30)

RUN, NODE = f"2026-follow-{os.getpid()}", "node1"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """A started attempt with one rank on this node and one elsewhere."""
    folder = tmp_path / "runs" / RUN / "attempts" / "1"
    nodes = [{"name": name, "lan_address": "127.0.0.1"} for name in (NODE, "node2")]
    write(
        folder / "plan.json",
        {"nodes": nodes, "ranks": [{"rank": 0, "node": NODE, "local_rank": 0}, {"rank": 1, "node": "node2", "local_rank": 0}]},
    )
    write(folder / "nodes" / NODE / "agent.json", {"pid": os.getpid(), "torchrun_pid": os.getpid(), "started_at": 1.0})
    return folder


def beat(attempt: Path, step: int, **changes: Any) -> None:
    write(attempt / "ranks" / "0" / "heartbeat.json", {"time": 5.0, "pid": os.getpid(), "phase": "training", "step": step, **changes})


def test_a_sign_says_who_lives_and_how_long_a_rank_has_stood_still(attempt: Path, tmp_path: Path) -> None:
    follower = status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE)
    first = read(NodeStatus, as_json(follower.look(100.0)))
    assert first.started and first.agent in "RS" and first.exit is None and set(first.ranks) == {0}
    assert not first.ranks[0].has_begun and not first.stopping
    beat(attempt, 3)
    follower.look(101.0)
    later = read(NodeStatus, as_json(follower.look(109.0)))
    assert (later.ranks[0].step, later.ranks[0].phase, later.ranks[0].still_s) == (3, "training", 8.0)
    beat(attempt, 3, passes=7)  # slow, and not dead: a pass is a sign, and no step
    passed = follower.look(109.5).ranks[0]
    assert (passed.still_s, passed.step_still_s) == (0.0, 8.5)
    beat(attempt, 3, time=3605.0)  # the node's clock jumps: a new beat all the same, and no age of an hour
    assert read(NodeStatus, as_json(follower.look(110.0))).ranks[0].still_s == 0.0
    beat(attempt, 4, pid=2**22 + 1)
    assert read(NodeStatus, as_json(follower.look(111.0))).ranks[0].is_dead


def test_a_rank_that_is_done_and_ends_between_two_looks_is_no_dead_one(
    attempt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = subprocess.Popen(["sleep", "60"])
    try:
        beat(attempt, 36, pid=rank.pid, phase="saving")
        read_now = files.read_object

        def read_late(path: str) -> Any:
            found = read_now(path)
            if path.endswith("heartbeat.json") and rank.poll() is None:  # a busy node: the follower loses the processor here
                beat(attempt, 36, pid=rank.pid, phase="done")
                rank.kill()
                rank.wait()
            return found

        monkeypatch.setattr(files, "read_object", read_late)
        sign = read(NodeStatus, as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0)))
        assert (sign.ranks[0].phase, sign.ranks[0].state, sign.ranks[0].is_dead) == ("done", "", False)
    finally:
        rank.kill()
        rank.wait()


def test_a_pid_from_before_a_reboot_is_nobodys(attempt: Path, tmp_path: Path) -> None:
    beat(attempt, 3)
    mine = {"pid": os.getpid(), "torchrun_pid": os.getpid(), "started_at": 1.0}
    for boot, lives in ((boot_clock.boot_id(), True), ("", True), ("the boot before", False)):
        write(attempt / "nodes" / NODE / "agent.json", mine | {"boot_id": boot})
        sign = read(NodeStatus, as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0)))
        assert sign.started and [bool(sign.agent), bool(sign.torchrun), bool(sign.ranks[0].state)] == [lives] * 3
        assert sign.ranks[0].is_dead is not lives


def test_a_stop_is_seen_before_the_ranks_end(attempt: Path, tmp_path: Path) -> None:
    ask_node("mark-stop", {"workdir": str(tmp_path), "run": RUN, "node": NODE})
    assert read(NodeStatus, as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0))).stopping


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("plan.json", "[1]"), ("plan.json", '{"ranks": [{"x": 1}], "nodes": 5}'), (f"nodes/{NODE}/agent.json", "[1]"),
        (f"nodes/{NODE}/agent.json", '{"pid": "x", "torchrun_pid": 1, "started_at": "y"}'), (f"nodes/{NODE}/exit.json", "[]"),
        (f"nodes/{NODE}/exit.json", '{"returncode": "x"}'), ("ranks/0/heartbeat.json", '{"pid": "x", "phase": 3, "step": "y", "time": []}'),
    ],
)  # fmt: skip
def test_a_node_with_a_damaged_file_is_heard(attempt: Path, tmp_path: Path, file: str, content: str) -> None:
    beat(attempt, 3)
    (attempt / file).write_text(content)
    sign = read(NodeStatus, as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0)))
    assert sign.exit is None and sign.attempt == 1


@pytest.mark.parametrize(
    "house",
    [
        5, {}, {"minute": 1440}, {"minute": -1}, {"minute": "x"}, {"minute": 0, "signs": [{"kind": "evil"}]}, {"minute": 0, "signs": 3},
        {"minute": 0, "signs": [{"kind": "asked"}] * 33}, {"minute": 0, "signs": [{"kind": "program", "name": "x" * 65}]},
        {"minute": 0, "signs": [{"kind": "program", "pid": -1}]}, {"minute": 0, "signs": [{"kind": "asked\n"}]},
    ],
)  # fmt: skip
def test_whoever_lies_of_the_owner_is_heard_without_it(attempt: Path, tmp_path: Path, house: Any) -> None:
    line = as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0))
    sign = read(NodeStatus, {**line, "house": house})
    assert sign.started and sign.house is None


def test_the_name_of_a_program_is_harmless(attempt: Path, tmp_path: Path) -> None:
    line = as_json(status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0))
    house = read(NodeStatus, {**line, "house": {"minute": 0, "signs": [{"kind": "card", "name": "\x1b[2Jgame\x07", "pid": 7}]}}).house
    assert house is not None and house.signs[0].words == "game uses its card"


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x", "phase": 3}'])
def test_a_damaged_heartbeat_is_no_crash(attempt: Path, tmp_path: Path, content: str) -> None:
    (attempt / "ranks" / "0").mkdir(parents=True)
    (attempt / "ranks" / "0" / "heartbeat.json").write_text(content)
    assert status_stream.StatusFollower(str(tmp_path), RUN, 1, NODE).look(1.0).ranks[0].state == ""


def test_a_change_is_said_at_once_and_silence_is_broken_each_second(attempt: Path, tmp_path: Path) -> None:
    request = json.dumps({"workdir": str(tmp_path), "node": NODE, "run": RUN, "attempt": 1}) + "\n"
    process = subprocess.Popen([sys.executable, "-m", "homelab.node", "follow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    said = process.stdout
    try:
        process.stdin.write(request)
        process.stdin.flush()
        json.loads(process.stdout.readline())
        quiet = time.monotonic()
        json.loads(process.stdout.readline())
        assert time.monotonic() - quiet < 5.0
        wait_until(lambda: json.loads(said.readline())["missing_s"] == {"node2": 0.0}, 10.0)
        write(attempt / "nodes" / NODE / "exit.json", {"returncode": 1, "signal": None})
        assert any(json.loads(process.stdout.readline())["exit"] for _ in range(3))
        process.stdin.close()
        assert process.wait(10) == 0, "it ends with its listener"
    finally:
        process.kill()
        process.wait()


PROGRAM = """
import faulthandler, os, signal, sys, time
def where_it_stands():
    print("ready", flush=True)
    time.sleep(60)
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=True)
where_it_stands()
"""


@pytest.fixture
def worker(attempt: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that answers the question for its stacks, as the worker does."""
    file = attempt / "ranks" / "0" / "stacks.txt"
    file.parent.mkdir(parents=True)
    environment = os.environ | {"HOMELAB_RUN": RUN, "HOMELAB_NODE": NODE}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(file)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout and process.stdout.readline() == "ready\n"
    beat(attempt, 3, pid=process.pid)
    yield process
    process.kill()
    process.wait()


def test_the_stacks_of_a_rank_say_where_it_stands(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    answer = ask_node("stacks", {"workdir": str(tmp_path), "run": RUN, "node": NODE})
    assert any("where_it_stands" in line for line in answer.ranks[0])
    assert worker.poll() is None


def test_a_program_that_would_die_of_the_question_is_not_asked(worker: subprocess.Popen[str], attempt: Path, tmp_path: Path) -> None:
    (attempt / "ranks" / "0" / "stacks.txt").unlink()
    assert ask_node("stacks", {"workdir": str(tmp_path), "run": RUN, "node": NODE}).ranks == {}
    wait_until(lambda: worker.poll() is None, 1.0)
