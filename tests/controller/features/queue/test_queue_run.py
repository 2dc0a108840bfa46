"""The runner: order, pauses, hours, faults; and killed between any two renames it loses no job and trains none twice."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queued_job import STATES, QueuedJob
from tests.controller.features.queue.practice_nodes import NIGHT, Killed, PracticeNodes, filled, job, renames_counted

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def queue(tmp_path: Path) -> QueueFolder:
    return QueueFolder(tmp_path)


def places(queue: QueueFolder) -> dict[int, list[str]]:
    """Number -> the folders that have it."""
    found: dict[int, list[str]] = {}
    for folder in (*STATES, "removed"):
        for file in (queue.root / folder).glob("*.json"):
            found.setdefault(int(file.stem), []).append(folder)
    return found


def test_in_their_order_and_a_job_that_fails_or_is_refused_stops_no_other(queue: QueueFolder) -> None:
    nodes = PracticeNodes(fates={2: "failed", 3: "refused", 4: "late"})
    filled(queue, job(), job(), job(), job(), job())
    queue.move(5, 1)
    nodes.runner(queue).go(stays=False)
    listing = queue.listing()
    assert [one.number for one in listing.done] == [1, 4, 5] and nodes.launched == [5, 1, 2, 4]
    assert {one.number: one.because for one in listing.failed} == {
        2: "it ended", 3: "rank 0 on a lacks 3.1 GB (recipe); to fix it: smaller batch",
    }  # fmt: skip
    assert [one.run for one in listing.failed if one.number == 3] == [""]
    assert any("waits: somebody plays a game on a" in line for line in nodes.said)


def test_jobs_of_other_nodes_train_at_once_and_an_earlier_job_keeps_its_nodes(queue: QueueFolder) -> None:
    nodes = PracticeNodes()
    filled(queue, job(nodes=("a",)), job(), job(nodes=("b",)))
    runner = nodes.runner(queue)
    runner.look()
    runner.look()
    assert nodes.launched == [1], "job 3 could have b, which job 2 waits for"
    queue.move(3, 1)
    runner.look()
    assert nodes.launched == [1, 3]
    runner.go(stays=False)
    assert nodes.launched == [1, 3, 2]


def test_a_pause_is_obeyed_in_every_state(queue: QueueFolder) -> None:
    nodes = PracticeNodes()
    filled(queue, job(), job())
    nodes.settles = lambda: queue.pause(nodes.now, is_paused=True)  # while the nodes are checked
    nodes.runner(queue).look()
    assert nodes.launched == [] and [one.state for one in queue.listing().waiting] == ["waiting", "waiting"]
    nodes.settles = lambda: None
    queue.pause(nodes.now, is_paused=False)
    nodes.tick(60)
    runner = nodes.runner(queue)
    runner.look()
    queue.pause(nodes.now, is_paused=True)  # while one trains: it goes to its end, the next one does not begin
    for _ in range(9):
        nodes.tick(5)
        runner.look()
    assert nodes.launched == [1] and [one.number for one in queue.listing().done] == [1]
    queue.pause(nodes.now, is_paused=False)
    runner.go(stays=False)
    assert nodes.launched == [1, 2]


def test_it_stops_at_a_checkpoint_in_the_morning_and_goes_on_in_the_next_night(queue: QueueFolder) -> None:
    nodes = PracticeNodes(saves_every=2)
    filled(queue, job(not_before="23:00", stop_at="07:00"))
    runner = nodes.runner(queue)
    runner.look()
    assert nodes.launched == []
    nodes.now = NIGHT + 8.95 * 3600  # 06:57
    runner.look()
    (run,) = nodes.runs.values()
    nodes.tick(300)
    assert run.step == 1
    runner.look()
    assert run.state == "running", "its next checkpoint is near"
    nodes.tick(5)
    runner.look()
    assert (run.state == "stopped" and queue.listing().waiting[0].because == "it is 07:00") or "not before" in queue.listing().waiting[
        0
    ].because
    assert queue.listing().waiting[0].run
    runner.look()
    nodes.now = NIGHT + 25 * 3600 + 1
    runner = nodes.runner(queue)  # another process
    runner.go(stays=False)
    assert run.state == "done" and nodes.launched == [1] and len(queue.listing().done) == 1


def test_without_a_checkpoint_it_is_stopped_after_a_while(queue: QueueFolder) -> None:
    nodes = PracticeNodes(saves_every=1000)
    filled(queue, job(not_before="22:00", stop_at="07:00"))
    runner = nodes.runner(queue)
    runner.look()
    (run,) = nodes.runs.values()
    nodes.now = NIGHT + 9 * 3600
    run.step = 1
    runner.look()
    nodes.now += 599
    runner.look()
    assert run.state == "running"
    nodes.now += 2
    runner.look()
    assert run.state == "stopped"


def test_a_clock_that_jumps_is_obeyed_at_the_next_look(queue: QueueFolder) -> None:
    nodes = PracticeNodes()
    filled(queue, job(not_before="23:00"), job(not_before="23:00", stop_at="07:00"))
    runner = nodes.runner(queue)
    runner.look()
    assert nodes.launched == []
    nodes.now = NIGHT + 3600  # forward: its time has come
    runner.look()
    assert nodes.launched == [1]
    nodes.now = NIGHT - 7200  # back: a job without a time to stop goes on
    runner.look()
    assert [run.state for run in nodes.runs.values()] == ["running"]
    nodes.now = NIGHT + 3600
    while nodes.launched == [1]:
        nodes.tick(20)
        runner.look()
    assert nodes.launched == [1, 2]
    nodes.now = NIGHT - 7200  # back, out of its hours: it is stopped, and waits
    runner.look()
    runner.look()
    assert [one.number for one in queue.listing().waiting] == [2] and queue.listing().waiting[0].run


def test_a_node_that_fails_twice_gets_no_third_job(queue: QueueFolder) -> None:
    nodes = PracticeNodes(fates={1: "broken", 2: "broken"})
    filled(queue, job(nodes=("a",)), job(nodes=("a",)), job(nodes=("a",)), job(nodes=("b",)))
    runner = nodes.runner(queue)
    for _ in range(12):
        runner.look()
        nodes.tick(20)
    assert nodes.launched == [4] and [one.number for one in queue.listing().waiting] == [3]
    queue.pause(nodes.now, is_paused=False)  # a person has looked
    runner.go(stays=False)
    assert nodes.launched == [4, 3]


def test_one_that_a_person_stops_is_not_started_again(queue: QueueFolder) -> None:
    nodes = PracticeNodes()
    filled(queue, job())
    runner = nodes.runner(queue)
    runner.look()
    (run,) = nodes.runs.values()
    run.state, run.is_by_hand = "stopped", True
    runner.go(stays=False)
    assert queue.listing().failed[0].because == "stopped by hand" and nodes.launched == [1]


def test_of_two_runners_one_works(queue: QueueFolder) -> None:
    filled(queue, job())
    with queue.runner():
        assert queue.has_runner()
        with pytest.raises(HomelabError, match="another homelab queue run") as refused, queue.runner():
            pass
        assert "process" in refused.value.where and refused.value.hint
    with queue.runner():
        pass
    assert not queue.has_runner()


def test_a_sweep_is_told_once_all_of_it_is_over(queue: QueueFolder) -> None:
    nodes, heard = PracticeNodes(fates={2: "failed"}), list[tuple[str, ...]]()
    filled(queue, *(job(sweep=1) for _ in range(3)), job())
    nodes.runner(queue, swept=heard.append).go(stays=False)
    assert [len(runs) for runs in heard] == [2]


def test_an_interrupt_while_a_job_is_started_gives_it_back(queue: QueueFolder) -> None:
    nodes = PracticeNodes()
    filled(queue, job())

    def interrupted() -> None:
        raise KeyboardInterrupt

    nodes.settles = interrupted
    with pytest.raises(KeyboardInterrupt):
        nodes.runner(queue).go(stays=False)
    assert places(queue) == {1: ["waiting"]}


def test_an_interrupt_when_the_ranks_have_begun_gives_it_back_with_its_run(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is held while a start is under way, and comes behind it: the recipe would be trained a second time."""
    nodes = PracticeNodes()
    filled(queue, job())
    moments = iter((None, None, None, KeyboardInterrupt))

    def moment() -> None:
        if (error := next(moments, None)) is not None:
            raise error

    monkeypatch.setattr(nodes, "moment", moment)
    with pytest.raises(KeyboardInterrupt):
        nodes.runner(queue).go(stays=False)
    (waiting,) = queue.listing().waiting
    assert nodes.alive(1) and waiting.run in nodes.runs
    nodes.runner(queue).go(stays=False)
    assert places(queue) == {1: ["done"]} and nodes.launched == [1] and len(nodes.runs) == 1


def test_a_runner_that_is_killed_while_it_goes_on_with_a_run_has_not_stopped_it_by_hand(queue: QueueFolder) -> None:
    nodes = PracticeNodes(step_s=3600.0)
    filled(queue, job(not_before="22:00", stop_at="23:00"))
    runner = nodes.runner(queue)
    runner.look()
    nodes.tick(3700.0)
    runner.look()
    assert queue.listing().waiting[0].run, "it was stopped for the hour"
    nodes.now = NIGHT + 86400
    nodes.kill_at = [1]
    with pytest.raises(Killed):
        nodes.runner(queue).look()
    nodes.runner(queue).go(stays=False)
    assert places(queue) == {1: ["done"]} and len(nodes.runs) == 1


def test_a_failed_job_ends_where_a_node_of_its_run_is_gone_for_good(queue: QueueFolder) -> None:
    nodes = PracticeNodes(fates={1: "failed"})
    nodes.has_lost_a_node = True
    filled(queue, job(nodes=("a",)), job(nodes=("b",)))
    nodes.runner(queue).go(stays=False)
    assert places(queue) == {1: ["failed"], 2: ["done"]}


def test_a_job_that_nothing_can_begin_is_refused_and_does_not_wait_for_ever(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, busy = PracticeNodes(), PracticeNodes.busy

    def asked(self: PracticeNodes, one: QueuedJob) -> str:
        if one.number == 1:
            raise InputError('no node is called "c" any more', where="cluster.toml has a, b", hint="add the job again")
        return busy(self, one)

    monkeypatch.setattr(PracticeNodes, "busy", asked)
    filled(queue, job(), job())
    nodes.runner(queue).go(stays=False)
    assert places(queue) == {1: ["failed"], 2: ["done"]}
    assert "add the job again" in queue.listing().failed[0].because


def test_a_full_disk_ends_no_night_and_sends_no_message_twice(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, told = PracticeNodes(), list[str]()
    filled(queue, job())
    runner = nodes.runner(queue)
    runner.tell = lambda occasion, subject, text: told.append(occasion)
    put, full = QueueFolder._put, [True]

    def refuses(self: QueueFolder, name: str, value: object) -> None:
        if name == "told.json" and self._file("done", 1).exists() and full:
            full.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, name, value)

    monkeypatch.setattr(QueueFolder, "_put", refuses)
    runner.go(stays=False)
    assert places(queue) == {1: ["done"]} and any("No space left" in line for line in nodes.said)
    for _ in range(2):
        runner.go(stays=False)
    assert told == ["queue over"]


def test_of_several_jobs_all_are_added_or_none(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = QueueFolder._write, list[int]()

    def third_fails(self: QueueFolder, folder: Any, one: QueuedJob) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(one.number)
        write(self, folder, one)

    monkeypatch.setattr(QueueFolder, "_write", third_fails)
    with pytest.raises(HomelabError, match="No space left"):
        filled(queue, job(), job(), job())
    assert places(queue) == {}


FATES = st.dictionaries(st.integers(1, 4), st.sampled_from(["failed", "refused", "late", "broken"]), max_size=3)
JOBS = st.lists(st.sampled_from([(), ("a",), ("b",)]), min_size=1, max_size=4)
EDITS = st.lists(st.sampled_from(["pause", "resume", "remove 1", "remove 2", "move 3 1", "move 2 2"]), max_size=4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(FATES, JOBS, st.lists(st.integers(1, 12), max_size=8), EDITS, st.booleans())
def test_killed_between_any_two_renames_no_job_is_lost_and_none_is_trained_twice(
    tmp_path_factory: pytest.TempPathFactory,
    fates: dict[int, str],
    wanted: list[tuple[str, ...]],
    kills: list[int],
    edits: list[str],
    ends: bool,
) -> None:
    queue = QueueFolder(tmp_path_factory.mktemp("queue"))
    hours: dict[str, Any] = {"not_before": "22:00", "stop_at": "22:01"} if ends else {}
    nodes = PracticeNodes(fates=fates)
    expected, removed = set(range(1, len(wanted) + 1)), set[int]()
    with renames_counted(nodes):
        filled(queue, *(job(nodes=names, **hours) for names in wanted))
        nodes.kill_at = list(kills)
        for turn in range(400):
            try:
                runner = nodes.runner(queue)
                for _ in range(40):
                    runner.look()
                    nodes.tick(5)
                    if nodes.now > NIGHT + 3 * 86400 or not (queue.listing().waiting or queue.listing().running):
                        break
                    if edits and not nodes.kill_at and turn:
                        _edit(queue, edits.pop(0), nodes.now)
                    if ends and nodes.now % 86400 > 22 * 3600 + 300:
                        nodes.now += 86400 - nodes.now % 86400 + 22 * 3600
            except Killed:
                pass
            found = places(queue)
            assert set(found) == expected and all(len(folders) == 1 for folders in found.values()), found
            queue.pause(nodes.now, is_paused=False) if not nodes.kill_at and not edits else None
            if not nodes.kill_at and not queue.listing().waiting and not queue.listing().running:
                break
    removed = {number for number, folders in places(queue).items() if folders == ["removed"]}
    listing = queue.listing()
    over = {one.number for one in (*listing.done, *listing.failed)}
    assert over | removed == expected, (places(queue), nodes.said[-5:])
    for one in listing.done:
        assert sum(run.state == "done" for run in nodes.runs.values() if run.job == one.number) == 1
    assert not [run for run in nodes.runs.values() if run.state == "running"], "an orphan"
    assert {one.number for one in listing.done} == {n for n in over if fates.get(n, "done") in ("done", "late")}


def _edit(queue: QueueFolder, words: str, now: float) -> None:
    verb, *numbers = words.split()
    try:
        if verb in ("pause", "resume"):
            queue.pause(now, is_paused=verb == "pause")
        elif verb == "remove":
            queue.remove([int(numbers[0])])
        else:
            queue.move(int(numbers[0]), int(numbers[1]))
    except InputError:
        pass  # it trains, or is not there


@pytest.mark.parametrize("fate", ["done", "failed", "refused", "late"])
def test_killed_at_each_moment_once(fate: str, tmp_path: Path) -> None:
    moments = 0
    for moment in range(1, 100):
        queue = QueueFolder(tmp_path / str(moment))
        nodes = PracticeNodes(fates={1: fate})
        with renames_counted(nodes):
            filled(queue, job())
            nodes.kill_at = [moment]
            try:
                nodes.runner(queue).go(stays=False)
                break
            except Killed:
                moments += 1
            assert sum(map(len, places(queue).values())) == 1
            nodes.runner(queue).go(stays=False)
        trained = sum(run.state in ("done", "failed") for run in nodes.runs.values())
        assert trained == (fate != "refused"), moment
        assert len(queue.listing().done) == (fate in ("done", "late"))
    assert moments > 5
