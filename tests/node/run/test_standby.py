"""Processes that wait for the next attempt of a run, on a real node program: a small program in place of the worker speaks its side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.node import paths
from homelab.node.run import rank_launcher, standby, standby_holder
from homelab.node.system import control_group, processes
from homelab.shared.protocol import files, waiting_mark
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(90)
RUN, NODE = "2026-01-01-0000-standby", f"node-{os.getpid()}"
REPOSITORY = Path(__file__).resolve().parents[3]

# It waits where it is told to, says who it is, and works until a file tells it how to end.
RANK = """
import json, os, sys, time
from homelab.node.system import processes
from homelab.shared.protocol import waiting_mark as standby
waited = standby.VARIABLE in os.environ
if waited:
    processes.rename(standby.WAITS)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    processes.rename(standby.AT_WORK)
    said = json.loads(line)
    os.environ.clear()
    os.environ.update(said["environment"])
    for path, number in ((said["out"], 1), (said["err"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
run, attempt, rank = os.environ["HOMELAB_RUN_DIR"], os.environ["HOMELAB_ATTEMPT"], os.environ["RANK"]
home = f"{run}/attempts/{attempt}/ranks/{rank}"
os.makedirs(home, exist_ok=True)
print(json.dumps({"waited": waited, "pid": os.getpid(), **{name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "ODD")}}), flush=True)
print("it speaks of attempt", attempt, file=sys.stderr, flush=True)
step = 0
while not os.path.exists(f"{run}/end-{attempt}-{rank}"):
    step += 1
    with open(f"{home}/heartbeat.json.new", "w") as beat:
        json.dump({"pid": os.getpid(), "phase": "training", "step": step, "time": time.time()}, beat)
    os.replace(f"{home}/heartbeat.json.new", f"{home}/heartbeat.json")
    time.sleep(0.02)
sys.exit(int(open(f"{run}/end-{attempt}-{rank}").read()))
"""


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.01)


class Machine:
    """One node with two ranks."""

    def __init__(self, folder: Path) -> None:
        self.workdir = folder / "work dir"
        self.run = Path(paths.run_dir(str(self.workdir), RUN))
        self.program = folder / "rank.py"
        self.program.write_text(RANK)

    def start(self, attempt: int, ranks: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, Any]:
        environment = {
            "HOMELAB_RUN": RUN, "HOMELAB_NODE": NODE, "HOMELAB_RUN_DIR": str(self.run), "HOMELAB_ATTEMPT": str(attempt), "ODD": "ä $(x)",
            "PYTHONPATH": str(REPOSITORY), "MASTER_PORT": "1", "NCCL_DEBUG_FILE": f"of-{attempt}", **more.pop("environment", {}),
        }  # fmt: skip
        plan = {
            "ranks": [{"rank": rank, "node": NODE, "local_rank": number} for number, rank in enumerate(ranks)],
            "nodes": [{"name": NODE, "lan_address": "127.0.0.1"}], "master_address": "127.0.0.1", "master_port": 5000 + attempt,
        }  # fmt: skip
        request = {
            "run": RUN, "attempt": attempt, "node": NODE, "workdir": str(self.workdir), "run_json": {"name": RUN}, "plan_json": plan,
            "command": ["/bin/false"], "environment": environment, "secrets": {}, "program": [sys.executable, str(self.program)], "direct": True,
            "standby_after_s": 0.0, **more,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "homelab.node", "start"],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            timeout=40,
            cwd=REPOSITORY,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def here(self, attempt: int) -> Path:
        return Path(paths.node_dir(str(self.run), attempt, NODE))

    def said(self, attempt: int) -> list[dict[str, Any]]:
        """What each rank has said of itself."""
        files_of = [self.here(attempt) / "logs" / f"{RUN}-{attempt}" / "attempt_0" / str(number) / "stdout.log" for number in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files_of))
        return [json.loads(file.read_text()) for file in files_of]

    def end(self, attempt: int, *codes: int) -> dict[str, Any]:
        for rank, code in enumerate(codes):
            (self.run / f"end-{attempt}-{rank}").write_text(str(code))
        wait_until((self.here(attempt) / "exit.json").exists)
        return dict(files.read_json(self.here(attempt) / "exit.json"))

    def waiting(self) -> list[int]:
        """The processes that only wait."""
        everyone, at_work = (set(processes.of_run(RUN, str(self.workdir), NODE, standbys=also)) for also in (True, False))
        return sorted(
            pid for pid in everyone - at_work if processes.command_line(pid)
        )  # one may have ended between the two looks, or be about to

    def waits(self, attempt: int) -> int:
        """Until holder, launcher and both ranks wait; the holder's number."""
        wait_until(
            lambda: [files.text(f"/proc/{pid}/comm") for pid in self.waiting()].count(waiting_mark.WAITS) == 2 and len(self.waiting()) == 4
        )
        return int(files.read_json(self.here(attempt) / standby.RECORD)["pid"])

    def prepare(self) -> str:
        """In a process of its own, as a node is asked: the one that asks is no parent for long."""
        request = {"node": NODE, "workdir": str(self.workdir), "run": RUN}
        program = [sys.executable, "-m", "homelab.node", "prepare"]
        done = subprocess.run(program, input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=40, cwd=REPOSITORY)
        return str(json.loads(done.stdout)["state"])

    def stop(self, **how: Any) -> Any:
        return ask_node("stop", {"node": NODE, "workdir": str(self.workdir), "run": RUN, "grace_s": 1.0, **how})


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path)
    yield one
    processes.end_run(RUN, str(one.workdir), NODE, grace_s=0.0)


def test_the_next_attempt_is_done_by_those_that_wait(machine: Machine) -> None:
    assert machine.start(1) == {}
    first = machine.said(1)
    assert [(one["waited"], one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["MASTER_PORT"]) for one in first] == [
        (False, "0", "0", "2", "5001"), (False, "1", "1", "2", "5001"),
    ]  # fmt: skip
    holder = machine.waits(1)
    reply = ask_node("poll", {"node": NODE, "workdir": str(machine.workdir), "run": RUN})
    assert reply.run.processes == 4, "watcher, launcher and two ranks: who waits is not of the attempt"
    ended = machine.end(1, 3, 0)
    assert (ended["returncode"], ended["stopped"]) == (1, False)
    assert len(machine.waiting()) == 4

    assert machine.stop(token="a recovery's").left == () and len(machine.waiting()) == 4, "a recovery leaves them for itself"
    assert machine.start(2, ranks=(1, 0)) == {}
    second = machine.said(2)
    assert [(one["waited"], one["RANK"], one["LOCAL_RANK"], one["MASTER_PORT"], one["ODD"]) for one in second] == [
        (True, "1", "0", "5002", "ä $(x)"), (True, "0", "1", "5002", "ä $(x)"),
    ]  # fmt: skip
    agent = files.read_json(machine.here(2) / "agent.json")
    assert agent["pid"] == holder and set(processes.of_run(RUN, str(machine.workdir), NODE)) >= {
        holder,
        agent["torchrun_pid"],
        *(one["pid"] for one in second),
    }
    assert (machine.here(2) / "logs" / f"{RUN}-2" / "attempt_0" / "0" / "stderr.log").read_text() == "it speaks of attempt 2\n"

    assert machine.waits(2) != holder, "and others wait for the third"
    assert machine.end(2, 0, 0)["returncode"] == 0
    wait_until(lambda: not processes.of_run(RUN, str(machine.workdir), NODE, standbys=True))


def test_the_end_of_a_rank_is_told_as_torchrun_tells_it(machine: Machine) -> None:
    from homelab.controller.diagnose.traces import child_failures

    machine.start(1, standby_after_s=None)
    (_, second) = machine.said(1)
    os.kill(second["pid"], signal.SIGKILL)
    wait_until((machine.here(1) / "exit.json").exists)
    reply = ask_node("poll", {"node": NODE, "workdir": str(machine.workdir), "run": RUN, "torchrun_lines": 60})
    (failure,) = child_failures(reply.run.torchrun_tail, reply.run.exit["ended_at"])
    assert (failure.rank, failure.signal, failure.is_root) == (1, signal.SIGKILL, True)
    assert failure.time_s is not None and abs(failure.time_s - reply.run.exit["ended_at"]) < 5
    assert not processes.of_run(RUN, str(machine.workdir), NODE)


def test_a_stop_by_hand_ends_those_that_wait(machine: Machine) -> None:
    machine.start(1)
    machine.waits(1)
    outcome = machine.stop(by_hand=True)
    assert outcome.asked == 8 and outcome.left == () and not processes.of_run(RUN, str(machine.workdir), NODE, standbys=True)


@pytest.mark.parametrize("changed", [{"environment": {"ODD": "another"}}, {"ranks": (0,)}, {"program": "another"}])
def test_what_has_changed_since_the_imports_is_started_anew(machine: Machine, changed: dict[str, Any]) -> None:
    """Another version of the code has another PYTHONPATH: it is one of these."""
    machine.start(1)
    holder = machine.waits(1)
    machine.end(1, 1, 0)
    if "program" in changed:
        (machine.program.with_name("other.py")).write_text(RANK)
        changed = {"program": [sys.executable, str(machine.program.with_name("other.py"))]}
    assert machine.start(2, standby_after_s=None, **changed) == {}
    out = machine.here(2) / "logs" / f"{RUN}-2" / "attempt_0" / "0" / "stdout.log"
    wait_until(lambda: out.exists() and out.read_text())
    assert json.loads(out.read_text())["waited"] is False
    wait_until(lambda: not machine.waiting() and not processes.is_alive(holder))


@pytest.mark.parametrize("who", ["rank", "launcher", "holder"])
def test_whoever_dies_while_it_waits_costs_a_start_and_no_attempt(machine: Machine, who: str) -> None:
    machine.start(1)
    holder = machine.waits(1)
    named = {files.text(f"/proc/{pid}/comm"): pid for pid in machine.waiting()}
    (launcher,) = [pid for pid in machine.waiting() if pid != holder and files.text(f"/proc/{pid}/comm") != waiting_mark.WAITS]
    os.kill({"rank": named[waiting_mark.WAITS], "launcher": launcher, "holder": holder}[who], signal.SIGKILL)
    if who == "rank":  # another one takes its place
        wait_until(lambda: named[waiting_mark.WAITS] not in machine.waiting())
        machine.waits(1)
    else:
        wait_until(lambda: not machine.waiting())
    machine.end(1, 1, 0)
    assert machine.start(2, standby_after_s=None) == {}
    assert [one["waited"] for one in machine.said(2)] == [who == "rank"] * 2


def test_a_rank_that_dies_at_the_last_moment_is_replaced(machine: Machine) -> None:
    machine.start(1)
    machine.waits(1)
    machine.end(1, 1, 0)
    (victim, _) = [pid for pid in machine.waiting() if files.text(f"/proc/{pid}/comm") == waiting_mark.WAITS]
    os.kill(victim, signal.SIGKILL)
    assert machine.start(2, standby_after_s=None) == {} and len(machine.said(2)) == 2


def test_whoever_was_frozen_starts_no_attempt_that_the_run_has_left_behind(machine: Machine) -> None:
    machine.start(1)
    holder = machine.waits(1)
    machine.end(1, 1, 0)
    os.kill(holder, signal.SIGSTOP)
    files.write_json(machine.here(1) / standby.GO, {"pid": holder, "attempt": 2, "node": NODE, "node_dir": str(machine.here(2))})
    (machine.here(1) / standby.RECORD).unlink()
    assert machine.start(2, standby_after_s=None, direct=False, command=["/bin/false"]) == {}
    wait_until((machine.here(2) / "exit.json").exists)
    assert machine.start(3, standby_after_s=None) == {} and len(machine.said(3)) == 2
    (machine.here(2) / "agent.json").unlink()
    os.kill(holder, signal.SIGCONT)
    wait_until(lambda: not processes.is_alive(holder) and not machine.waiting())
    assert not (machine.here(2) / "agent.json").exists() and len(processes.of_run(RUN, str(machine.workdir), NODE)) == 4


# torchrun 2.13 after kill -9 of a rank. In its place a program says it and goes on for a minute.
WORDS = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
=====================================================
homelab.worker FAILED
-----------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
-----------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_02:28:49
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 7123)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 7123
"""
END = "=====================================================\n"


def test_torchrun_that_has_said_its_last_words_is_not_waited_for(machine: Machine) -> None:
    says = "import sys, time; print(sys.argv[1], file=sys.stderr, end='', flush=True); time.sleep(60)"
    common: dict[str, Any] = {"direct": False, "standby_after_s": None}
    machine.start(1, **common, command=[sys.executable, "-c", says, WORDS + END])
    wait_until((machine.here(1) / "exit.json").exists, 10.0)
    assert files.read_json(machine.here(1) / "exit.json")["returncode"] == 1
    machine.start(2, **common, command=[sys.executable, "-c", says, WORDS])
    machine.start(3, **common, command=[sys.executable, "-c", says, WORDS + END], program=[])
    for attempt in (2, 3):
        wait_until(lambda attempt=attempt: "Root Cause" in files.text(machine.here(attempt) / "err.log"))
    time.sleep(0.5)
    assert not any((machine.here(attempt) / "exit.json").exists() for attempt in (2, 3)), (
        "half of them, and those of somebody's own program"
    )


# It hears the request to end, and ends two seconds later.
SLOW_TO_END = """
import os, signal, sys, time
open("/proc/self/comm", "w").write(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), os._exit(0)))
print("here", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize(("name", "killed"), [(waiting_mark.SAVES, 0), (waiting_mark.AT_WORK, 1)])
def test_who_saves_before_it_ends_gets_the_time_for_it(tmp_path: Path, name: str, killed: int, has_waited: bool) -> None:
    """Also a rank that had waited for its attempt: a recovery, which leaves alone what waits, must not go on beside it."""
    environment = {
        **os.environ,
        **({waiting_mark.VARIABLE: "1"} if has_waited else {}),
        "HOMELAB_RUN": RUN,
        "HOMELAB_NODE": NODE,
        "HOMELAB_RUN_DIR": paths.run_dir(str(tmp_path), RUN),
    }
    with subprocess.Popen([sys.executable, "-c", SLOW_TO_END, name], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
        waiting = threading.Thread(target=rank.wait)
        waiting.start()
        ended = processes.end_run(RUN, str(tmp_path), NODE, grace_s=0.3, standbys=False)
        rank.kill()  # one that was not seen
        waiting.join()
    assert (ended.asked, ended.killed, ended.left) == (1, killed, ())


def test_those_that_nobody_needs_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start(1)
    machine.waits(1)
    machine.end(1, 1, 0)
    plan, here = files.read_json(machine.here(1) / "start.json"), str(machine.here(1))
    child = rank_launcher.spawn(str(machine.run), open(os.devnull, "wb"))  # noqa: SIM115
    monkeypatch.setattr(standby_holder, "_LOOK_S", 0.02)
    monkeypatch.setattr(standby_holder, "_UNCLAIMED_S", 0.2)
    try:
        assert standby_holder._wait(plan, str(machine.run), here, child) is None, "its attempt is over, and no other comes"
        asks = threading.Thread(target=lambda: [(time.sleep(0.05), machine.prepare()) for _ in range(4)])
        monkeypatch.setattr(standby_holder, "_UNCLAIMED_S", 1.0)
        asks.start()
        began_s = time.monotonic()
        assert standby_holder._wait(plan, str(machine.run), here, child) is None
        asked_s = time.monotonic()
        asks.join()
        assert asked_s - began_s > 1.2, "as long as somebody asks for it"
        monkeypatch.setattr(standby_holder, "_UNCLAIMED_S", 1e9)
        monkeypatch.setattr(standby_holder, "_LEAST_BYTES", 1 << 62)
        assert standby_holder._wait(plan, str(machine.run), here, child) is None, "memory is short"
        monkeypatch.setattr(standby_holder, "_LEAST_BYTES", 0)
        assert machine.start(2, direct=False, command=["/bin/sleep", "60"]) == {}, "an attempt that they were not asked for"
        assert standby_holder._wait(plan, str(machine.run), here, child) is None
        assert standby_holder._wait(plan, str(machine.run / "gone"), here, child) is None
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not machine.waiting())


def test_a_node_that_comes_back_is_prepared_before_its_attempt(machine: Machine) -> None:
    """It lost its power, or stopped itself because it heard nobody: nothing waits there any more."""
    assert machine.prepare() == "none", "it was never in this run: it begins slower"
    machine.start(1)
    machine.waits(1)
    processes.end_run(RUN, str(machine.workdir), NODE, grace_s=0.0)
    files.write_json(machine.here(1) / "exit.json", {"returncode": 1, "ended_at": 1.0, "alone": "nobody was heard"})
    wait_until(lambda: machine.prepare() == "ready")
    holder = machine.waits(1)
    assert machine.prepare() == "ready" and machine.waits(1) == holder, "one is enough"
    assert machine.stop(token="a recovery's").left == () and len(machine.waiting()) == 4
    assert machine.start(5, ranks=(1, 0)) == {}, "the others have made some attempts without it"
    assert [(one["waited"], one["RANK"]) for one in machine.said(5)] == [(True, "1"), (True, "0")]


def test_one_of_a_node_that_trains_is_not_begun_twice(machine: Machine) -> None:
    machine.start(1, standby_after_s=2.0)
    machine.said(1)
    wait_until(lambda: machine.prepare() == "ready")
    holder = machine.waits(1)
    log = machine.here(1) / "agent.log"
    wait_until(
        lambda: int(files.read_json(paths_of_beat(machine, 0))["step"]) > 200
    )  # four seconds: two more than it would have begun by itself
    assert machine.waits(1) == holder and "no standby" not in files.text(log)


def test_of_several_that_ask_at_once_one_begins_it(machine: Machine) -> None:
    """Two nodes come back together, and each has the others prepared: two holders of one attempt would both begin its ranks."""
    machine.start(1, standby_after_s=60.0)
    machine.said(1)
    gate, states = threading.Barrier(4), list[str]()

    def ask() -> None:
        gate.wait()
        states.append(machine.prepare())

    asking = [threading.Thread(target=ask) for _ in range(gate.parties)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert set(states) <= {"begun", "ready"} and len(states) == gate.parties
    machine.waits(1)
    machine.end(1, 1, 0)
    assert machine.start(2, standby_after_s=None) == {} and [one["waited"] for one in machine.said(2)] == [True, True]
    assert len(processes.of_run(RUN, str(machine.workdir), NODE, standbys=True)) == 4, "watcher, launcher and two ranks"


def test_what_another_one_was_told_is_not_done(machine: Machine) -> None:
    machine.start(1)
    holder = machine.waits(1)
    machine.end(1, 1, 0)
    files.write_json(machine.here(1) / standby.RECORD, {"pid": os.getpid()})
    files.write_json(machine.here(1) / standby.GO, {"pid": os.getpid(), "attempt": 2, "node": NODE, "node_dir": str(machine.here(2))})
    wait_until(lambda: not processes.is_alive(holder) and not machine.waiting())
    assert files.read_json(machine.here(1) / standby.RECORD) == {"pid": os.getpid()}, "the other one's"


def test_a_run_that_was_stopped_or_has_none_prepares_nothing(machine: Machine) -> None:
    machine.start(1, standby_after_s=None)
    machine.said(1)
    assert machine.prepare() == "none" and not machine.waiting(), "the recipe wants none"
    machine.start(2)
    machine.waits(2)
    assert machine.stop(by_hand=True).left == ()
    assert machine.prepare() == "none" and not machine.waiting(), "a question that was on its way while a person stopped the run"


def test_what_ends_again_and_again_is_not_begun_for_ever(machine: Machine) -> None:
    machine.start(1)
    machine.waits(1)
    processes.end_run(RUN, str(machine.workdir), NODE, grace_s=0.0)
    (machine.here(1) / "exit.json").write_text('{"returncode": 0}')
    states = []
    for _ in range(5):
        states.append(machine.prepare())
        wait_until(lambda: not machine.waiting())
    assert set(states[:3]) <= {"begun", "ready"} and states[3:] == ["none", "none"]


def paths_of_beat(machine: Machine, rank: int) -> Path:
    return machine.run / "attempts" / "1" / "ranks" / str(rank) / "heartbeat.json"


@pytest.fixture
def preparing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> standby.Preparing:
    """Of an attempt whose agent is this process: it looks again after 0.2 s, then after twice the time."""
    machine.start(1, standby_after_s=None)
    machine.said(1)
    monkeypatch.setenv("HOMELAB_RUN", RUN)
    monkeypatch.setenv("HOMELAB_RUN_DIR", str(machine.run))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(standby, "_AGAIN_S", 0.2)
    monkeypatch.setattr(standby, "_LOOK_S", 0.05)
    return standby.Preparing({"run": RUN, "attempt": 1, "node": NODE, "standby_after_s": 0.0}, str(machine.run), str(machine.here(1)))


def test_a_node_without_the_memory_for_it_prepares_nothing_until_it_has_it(
    machine: Machine, preparing: standby.Preparing, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: said.append(text))
    free = 2 * waiting_mark.RANK_BYTES - 1
    monkeypatch.setattr(control_group, "available_bytes", lambda: free)
    with preparing:
        wait_until(lambda: len(said) == 2)
        assert {*said} == {"no standby: this node has less than 2 GiB of free memory"} and not machine.waiting()
        free += 1
        machine.waits(1)


def test_one_that_has_ended_is_replaced(machine: Machine, preparing: standby.Preparing) -> None:
    """Killed, or ended by itself where memory became short for a while: a run of weeks must not be without one from then on."""
    with preparing:
        holder = machine.waits(1)
        for _ in range(2):
            os.kill(holder, signal.SIGKILL)
            wait_until(lambda before=holder: standby.holder(str(machine.run), str(machine.here(1))) not in (None, before))
            holder = machine.waits(1)
            assert len(machine.waiting()) == 4, "one, and nothing of the one before"
    preparing._thread.join(10)
    assert not preparing._thread.is_alive()


def test_those_that_wait_outlive_the_agent_while_its_ranks_work(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed agent leaves torchrun behind, and the run goes on: nobody else would begin others."""
    machine.start(1)
    machine.waits(1)
    agent = files.read_json(machine.here(1) / "agent.json")
    os.kill(agent["pid"], signal.SIGKILL)
    plan, here = files.read_json(machine.here(1) / "start.json"), str(machine.here(1))
    child = rank_launcher.spawn(str(machine.run), open(os.devnull, "wb"))  # noqa: SIM115
    monkeypatch.setattr(standby_holder, "_LOOK_S", 0.02)
    monkeypatch.setattr(standby_holder, "_UNCLAIMED_S", 0.2)
    ended = threading.Thread(target=standby_holder._wait, args=(plan, str(machine.run), here, child))
    try:
        ended.start()
        ended.join(1.0)
        assert ended.is_alive(), "its ranks still train"
        files.write_json(machine.here(1) / "agent.json", {**agent, "boot_id": "another"})
        ended.join(10.0)
        assert not ended.is_alive(), "after a power cut the numbers are those of others"
        files.write_json(machine.here(1) / "agent.json", agent)
        os.kill(agent["torchrun_pid"], signal.SIGKILL)
        assert standby_holder._wait(plan, str(machine.run), here, child) is None, "nothing of the attempt is left"
    finally:
        child.kill()
        child.wait()


def test_a_node_that_was_frozen_prepares_nothing_until_its_ranks_go_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has gone on: when it awakes, the time until the processes are prepared is over, and the run may have gone on without it."""
    machine.start(1, standby_after_s=None)
    ranks = [rank["pid"] for rank in machine.said(1)]
    started, looks = [], []

    class Frozen(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout == 60.0:
                processes.signal_all(ranks, signal.SIGSTOP)
                return False
            looks.append(timeout)
            return super().wait(0.02)

    monkeypatch.setattr("homelab.node.system.programs.detached", lambda *_: started.append(len(looks)))
    preparing = standby.Preparing({"run": RUN, "attempt": 1, "node": NODE, "standby_after_s": 60.0}, str(machine.run), str(machine.here(1)))
    preparing._ended = Frozen()
    with preparing:
        wait_until(lambda: len(looks) > 20)
        assert started == []
        processes.signal_all(ranks, signal.SIGCONT)
        preparing._thread.join(10)
    assert len(started) == 1


def test_who_ends_while_its_name_is_read_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is left and the reading of its name, a rank that saves may be gone."""
    environment = {**os.environ, "HOMELAB_RUN": RUN, "HOMELAB_NODE": NODE, "HOMELAB_RUN_DIR": paths.run_dir(str(tmp_path), RUN)}
    with subprocess.Popen([sys.executable, "-c", SLOW_TO_END, waiting_mark.SAVES], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
        text, signal_all, asked = files.text, processes.signal_all, list[int]()

        def ends_first(path: str) -> str:
            if path == f"/proc/{rank.pid}/comm" and asked:
                rank.kill()
                rank.wait()
            return text(path)

        def tell(pids: Iterable[int], number: int) -> None:
            signal_all(pids, number)
            asked.append(number)

        monkeypatch.setattr(files, "text", ends_first)
        monkeypatch.setattr(processes, "signal_all", tell)
        ended = processes.end_run(RUN, str(tmp_path), NODE, grace_s=0.0, standbys=False)
    assert (ended.asked, ended.killed, ended.left) == (1, 0, ())
