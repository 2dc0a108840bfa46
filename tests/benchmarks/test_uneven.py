"""`scripts/bench shares` judges itself: disturbed rounds do not count, and a part that ends early says why and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import shares
from benchmarks.uneven import aftermath, machines, meter, noise
from benchmarks.uneven.ledger import Disturbed, Ledger
from benchmarks.uneven.validity import Account, disturbance

from homelab.controller.run import event_log, events
from homelab.controller.run.paths import RunPaths


def account(used: tuple[float, float] = (0.6, 0.3), *, others: float = 0.05, seconds: float = 20.0) -> Account:
    """`used` cores by two nodes that may use 0.6 and 0.3, 0.1 by the benchmark, the rest by others; on two cores."""
    nodes = {name: (cores * seconds, limit * seconds) for name, cores, limit in zip(("node1", "node2"), used, (0.6, 0.3), strict=True)}
    return Account(seconds=seconds, cores=2, busy=(sum(used) + 0.1 + others) * seconds, ours=0.1 * seconds, nodes=nodes)


@pytest.mark.parametrize(
    ("seen", "computing", "said"),
    [
        (account(), True, None),
        (account((0.62, 0.31)), True, None),
        (account((0.2, 0.1)), False, None),  # ranks wait for each other
        (account(others=0.15), False, None),
        (account((1.4, 0.7), seconds=0.2), False, None),  # a slice or two
        (account((0.75, 0.3)), False, "node1 used 0.75 cores of 0.60: its limit was not held"),
        (account((0.6, 0.2)), True, "node2 got 0.20 cores of 0.30: something kept it from computing"),
        (account(others=0.4), False, "others kept 0.40 of this machine's 2 cores busy"),
        (account((0.8, 0.3), others=1.0), False, "node1 used 0.80 cores of 0.60: its limit was not held; others kept 1.00"),
    ],
)
def test_what_disturbs(seen: Account, computing: bool, said: str | None) -> None:
    found = disturbance(seen, computing=computing)
    assert found is None if said is None else found is not None and found.startswith(said), found


def test_no_time_is_no_measurement() -> None:
    assert disturbance(account(seconds=0.0))


class Bench(shares.Bench):
    """One whose rounds are lists of what others did in each part."""

    def __init__(self, *rounds: list[float]) -> None:
        self.rounds = iter(rounds)
        self.stopped = 0
        self.said: list[str] = []
        self.say = self.said.append
        self.ledger = Ledger(self.said.append)
        self.nodes: Any = SimpleNamespace(stop_all=self._stopped)

    def _stopped(self) -> None:
        self.stopped += 1

    def _play(self, number: int) -> None:
        for others in next(self.rounds):
            run = machines.Run("r", {}, 84, [])
            self.ledger.note("auto_over_sum_equal_length", number + others)
            self.ledger.keep("auto", "equal_length", run, machines.Window(1, 7, 100, 2.0, (100,), (0.3,), None), account(others=others))

    def calibrate(self) -> None:
        self._play(0)

    def repeat(self) -> None:
        self._play(self.ledger.round)


def test_a_disturbed_round_is_played_again_and_counts_for_nothing() -> None:
    bench = Bench([0.0], [0.0, 0.9], [0.0, 0.1], [0.9], [0.9], [0.1, 0.0])
    bench.all_rounds(2)
    assert bench.stopped == 3
    assert bench.ledger._ratios == {"auto_over_sum_equal_length": [0.0, 1.0, 1.1, 2.1, 2.0]}
    assert bench.ledger._speeds == {"auto, equal length": [50.0] * 4}
    assert [bool(line["disturbed"]) for line in bench.ledger.raw] == [False, False, True, False, False, True, True, False, False]
    assert sum("this round is discarded: auto, equal length: others kept 0.90" in line for line in bench.said) == 3


def test_a_round_that_is_disturbed_each_time_ends_it_with_the_rounds_before() -> None:
    bench = Bench([0.0], [0.0], [0.9], [0.9], [0.0, 0.9], [0.9])
    with pytest.raises(Disturbed, match="others kept") as why:
        bench.all_rounds(3)
    assert bench.ledger.figures() == {"auto_over_sum_equal_length": 0.5}
    said = shares._given_up(bench.ledger.round, 3, why.value)
    assert said.startswith("error: round 2 of 3 was disturbed all 4 times") and "\nfix:   " in said


def test_cpu_time_of_a_process_and_of_the_machine() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    stat = "12 (a) b) S 1 12 12 0 -1 4194560 9 9 9 9 100 20 3 1 20 0 1 0 777 1 1"
    assert meter.spent(stat) == (777, pytest.approx(124 * tick))
    assert meter.stolen_s("cpu  10 1 20 5000 300 2 3 4 0 0\ncpu0 1\n") == pytest.approx(4 * tick)


class _Lab:
    """A machine as a lab of one node, which is the process `pid`."""

    def __init__(self, pid: int, cluster_file: Path) -> None:
        self.pid, self.cluster_file = pid, cluster_file
        self.nodes = [SimpleNamespace(name="node1")]

    def processes_of(self, node: str) -> set[int]:
        return {self.pid}


def test_a_node_s_time_is_its_own_and_a_supervisor_s_is_ours(tmp_path: Path) -> None:
    """What a process computes before the clock starts does not count; what it is allowed changes with its limit."""
    work = "import sys, time\nfor line in sys.stdin:\n  end = time.process_time() + 0.2\n  while time.process_time() < end: pass\n  print(flush=True)"

    def start(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def compute(process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()

    with start() as node, start(HOMELAB_CLUSTER=str(tmp_path / "cluster.toml")) as supervisor, start(HOMELAB_CLUSTER="") as neighbour:
        compute(node)
        watch = meter.Meter(_Lab(node.pid, tmp_path / "cluster.toml"))  # type: ignore[arg-type]
        for _ in range(6):
            watch.limited({"node1": 1.0})
            watch.begin()
            compute(node)
            watch.limited({"node1": 0.0})
            compute(supervisor)
            found = watch.account()
            compute(neighbour)
            with_neighbour = watch.account()
            # The time of a process of another test that ends between two looks is in the first one alone: once more.
            if found.busy >= found.nodes["node1"][0] + 0.15 and with_neighbour.busy >= found.busy + 0.15:
                break
        for process in (node, supervisor, neighbour):
            assert process.stdin
            process.stdin.close()
    used, allowed = found.nodes["node1"]
    assert 0.15 < used < 0.35 and 0.15 < allowed < found.seconds
    assert found.ours >= 0.15 and found.busy >= used + 0.15
    assert with_neighbour.busy >= found.busy + 0.15


def test_a_process_that_is_just_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is in nobody's file for a moment."""
    totals = iter([9.0, 4.0, 4.0, 11.0])
    monkeypatch.setattr(meter, "_total", lambda pids: next(totals) if pids == {1} else 0.0)
    watch = meter.Meter(_Lab(1, tmp_path / "cluster.toml"))  # type: ignore[arg-type]
    watch.limited({"node1": 1.0})
    assert watch.account().nodes["node1"][0] == 2.0


def test_what_was_started_for_the_cluster_is_ended(tmp_path: Path) -> None:
    """Supervisors outlive the command that started them; one that ignores SIGTERM is killed."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environment = os.environ | {"HOMELAB_CLUSTER": str(tmp_path / "cluster.toml")}
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True, env=environment) as process:
        assert process.stdout
        process.stdout.readline()
        other = subprocess.Popen(["sleep", "60"], env=os.environ | {"HOMELAB_CLUSTER": str(tmp_path / "another.toml")})
        try:
            patience, aftermath._GRACE_S = aftermath._GRACE_S, 1.0
            aftermath.end_all(tmp_path / "cluster.toml")
            assert process.wait(10) == -9 and other.poll() is None
        finally:
            aftermath._GRACE_S = patience
            other.kill()
            other.wait()


def test_a_run_that_goes_to_its_end_has_failed_where_its_first_attempt_has(tmp_path: Path) -> None:
    run = machines.Run("r", {"node1": tmp_path / "1", "node2": tmp_path / "2"}, 84, [])
    for code, failed in ((0, False), (None, True)):
        place = tmp_path / ("1" if code == 0 else "2") / "attempts/1/nodes" / ("node1" if code == 0 else "node2")
        place.mkdir(parents=True)
        (place / "exit.json").write_text(f'{{"returncode": {"null" if code is None else code}}}')
        assert (run.ended(), run.failed()) == (True, failed)


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "2026-01-01-0000-auto")
    assert aftermath.story(paths) == ""
    paths.root.mkdir()
    for number in range(40):
        event_log.append(paths, events.note(f"trouble {number}", at=time.time()))
    paths.supervisor_log.write_text("12:00:00 attempt 2 goes on\n")
    said = aftermath.story(paths)
    assert said.startswith("== events of 2026-01-01-0000-auto\n") and "trouble 39" in said and "trouble 9\n" not in said
    assert said.endswith("12:00:00 attempt 2 goes on")


@pytest.mark.parametrize(
    ("problem", "kept"),
    [(SystemExit("error: it ended"), True), (RuntimeError("a bug"), True), (aftermath.Interrupted(143), False), (None, False)],
    ids=["early end", "bug", "interrupted", "end"],
)
def test_the_folder_is_kept_where_something_failed(
    problem: BaseException | None, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    lab = SimpleNamespace(cluster_file=tmp_path / "cluster.toml", down=lambda keep_files: ended.append(keep_files))
    monkeypatch.setattr(machines, "Lab", SimpleNamespace(up=lambda *a, **b: lab, open=lambda folder: lab))
    monkeypatch.setattr(machines, "Machines", lambda lab, desk: desk)
    monkeypatch.setattr(machines, "is_lab", lambda folder: True)
    monkeypatch.setattr(aftermath, "end_all", ended.append)
    said: list[str] = []

    def run() -> None:
        with machines.machines(said.append, lambda desk: None) as desk:
            places.append(desk.parent)
            if problem is not None:
                raise problem

    places: list[Path] = []
    monkeypatch.setattr(machines.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "bench"))
    (tmp_path / "bench").mkdir()
    if problem is None:
        run()
    else:
        with pytest.raises(type(problem)):
            run()
    assert ended == [lab.cluster_file, kept], "supervisors end before their nodes do"
    assert places[0].is_dir() == kept
    assert any(f"kept, to look at: {places[0]}" in line for line in said) == kept


def test_the_ceiling_is_what_the_noise_leaves() -> None:
    even = [[(100, 2.0), (100, 2.0)], [(50, 2.0), (50, 2.0)]]
    assert noise.ceiling(even) == 1.0 == noise.ceiling([[(100, 1.0), (100, 3.0)]]), "one rank waits for nobody"
    assert noise.ceiling([[(100, 2.0), (150, 3.0)], [(50, 2.0), (25, 1.0)]]) == 1.0, "more rows are no noise"
    # Each is once a third slower than usual and once a third faster: every step takes 4/3 of what both would take with even speed.
    assert noise.ceiling([[(30, 2.0), (30, 4.0)], [(30, 4.0), (30, 2.0)]]) == pytest.approx(3 / 4)
