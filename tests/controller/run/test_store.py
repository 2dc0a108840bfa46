"""What happened to a run, written down on two machines."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.remote.poll_reply import event_of
from homelab.controller.run import event_log, events, store
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(10)


def test_what_another_machine_wrote_down_is_added_once_and_stands_in_its_place(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    store.append_lines(paths.events_jsonl, [{"time": 1.5, "what": "launched"}, {"time": 9.0, "what": "done"}])
    elsewhere = [
        {"time": 1.5, "what": "launched"},
        {"time": 4.0, "what": "trouble: a rank is gone"},
        {"time": 6.0, "what": "attempt 2 continues"},
    ]
    for _ in range(3):
        event_log.gather(paths, elsewhere)
    assert [event["what"] for event in event_log.lines(paths)] == ["launched", "trouble: a rank is gone", "attempt 2 continues", "done"]
    assert len(paths.events_jsonl.read_text().splitlines()) == 4


def test_what_is_only_told_and_cannot_be_written_is_remembered_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "UNWRITTEN", {})
    paths = RunPaths(tmp_path)
    paths.run_json.write_text("{}")
    for file in (paths.state_json, paths.events_jsonl):
        file.mkdir()
    store.set_state(paths, "stopping", 1, intent="stopping")
    event_log.append(paths, events.event("stopped"))
    event_log.gather(paths, [{"time": 1.5, "what": "launched"}])
    assert list(store.UNWRITTEN) == [paths.state_json, paths.events_jsonl]
    assert f"mv {paths.state_json} {paths.state_json}.damaged" in store.UNWRITTEN[paths.state_json].hint
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "run.json", "state.json"], "nothing half written is left"


def test_what_a_later_command_relies_on_is_not_passed_over(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    (paths.plan_json(2) / "x").mkdir(parents=True)
    with pytest.raises(HomelabError, match="cannot be written"):
        store.write_json(paths.plan_json(2), {})


def test_an_attempt_whose_plan_could_not_be_written_uses_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HomelabError, match="No space left") as caught:
        store.write_json(RunPaths(tmp_path).plan_json(2), {})
    assert "make room" in caught.value.hint and not RunPaths(tmp_path).attempt(2).exists()


def test_a_line_that_a_full_disk_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events_jsonl.write_text('{"time": 1, "what": "launched"}\n{"time": 2, "wh')
    event_log.append(paths, events.state("done", 1))
    assert [event["what"] for event in event_log.lines(paths)] == ["launched", "done"]


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EDQUOT, "make room"), (errno.EACCES, "sudo chown"), (errno.EROFS, "remount,rw"), (errno.EIO, "ls -ld")]
)
def test_each_refusal_of_a_disk_has_a_command(tmp_path: Path, number: int, words: str) -> None:
    assert words in store.disk_error_hint(tmp_path / "run.json", OSError(number, "x"))


def test_a_file_where_a_folder_belongs_is_put_aside_inside_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "the run").mkdir()
    (tmp_path / "the run/run.json").write_text("{}")
    (tmp_path / "the run/attempts").write_text("")
    with pytest.raises(HomelabError) as caught:
        store.write_json(tmp_path / "the run/attempts/1/plan.json", {})
    assert caught.value.hint.endswith(f"mv '{tmp_path}/the run/attempts' '{tmp_path}/the run/attempts.damaged'")


def test_a_folder_of_somebody_else_where_a_file_is_to_be_written_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(HomelabError) as caught:
        store.write_text(tmp_path, "a page")
    assert caught.value.hint == f"it is a folder: name a file in it, like {tmp_path}/FILE"


@pytest.mark.parametrize("place", ["/dev/null/x", "chats.jsonl", "chats.jsonl/deeper/runs"])
def test_a_file_of_somebody_else_where_the_runs_are_to_be_kept_is_left_alone(tmp_path: Path, place: str) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(HomelabError) as caught:
        store.write_json(tmp_path / place / "r/run.json", {})
    assert "mv " not in caught.value.hint and "sudo" not in caught.value.hint
    assert (
        "--runs-dir DIR" in caught.value.hint
        and ("/dev/null" if place.startswith("/dev") else "chats.jsonl") + " is no folder" in caught.value.hint
    )


def test_events_keep_the_order_of_their_writing_when_the_clock_goes_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    written = ((7200.0, "launched"), (7300.0, "trouble"), (200.0, "attempt 2 continues"), (210.0, "done"))
    store.append_lines(paths.events_jsonl, [{"time": time, "what": what} for time, what in written])
    assert [event["what"] for event in event_log.lines(paths)] == ["launched", "trouble", "attempt 2 continues", "done"]
    event_log.gather(paths, [{"time": 205.0, "what": "of a node"}, {"time": 206.0, "what": "of a node, too"}])
    assert [event["what"] for event in event_log.lines(paths)] == [
        "launched",
        "trouble",
        "attempt 2 continues",
        "of a node",
        "of a node, too",
        "done",
    ]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"what": "x"},
        {"time": "soon", "what": "x"},
        {"time": float("nan"), "what": "x"},
        {"time": 1.0, "what": ["x"]},
        {"time": 1.0, "what": "x", "nodes": 7},
    ],
)
def test_half_a_line_from_a_node_is_left_out(line: dict[str, object]) -> None:
    assert event_of(line) is None


def test_what_a_node_says_is_made_harmless() -> None:
    assert event_of({"time": 1, "what": "\x1b[2Jtrouble\n", "because": "a\rb", "own": "x"}) == {
        "time": 1.0,
        "what": "trouble",
        "because": "b",
    }


def test_two_that_launch_at_the_same_moment_never_have_the_same_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: store.take_name(tmp_path / "runs", "law", 0.0, {store.new_name("law", 0.0, set())}), range(16)))
    assert len(set(names)) == 16 and set(names) == set(os.listdir(tmp_path / "runs"))
    assert sorted(name.rpartition("-law")[2] for name in names) == sorted(f"-{number}" for number in range(2, 18))
    (tmp_path / "runs" / names[0] / "run.json").write_text("{}")
    for name in names:
        store.give_back(tmp_path / "runs", name)
    assert os.listdir(tmp_path / "runs") == [names[0]], "only a name of which nothing has come is given back"


def test_a_place_where_no_run_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(HomelabError, match="cannot be written") as caught:
        store.take_name(tmp_path / "runs", "law", 0.0, set())
    assert str(tmp_path / "runs") in caught.value.where
