"""Events are values: programs go by kind, attempt and numbers; the sentence is for people. Lines of older runs say the same."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.features.status.failure import since
from homelab.controller.remote.poll_reply import event_of
from homelab.controller.run import event_log, events
from homelab.controller.run.events import Event, Kind, event
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(20)

RECORDED = Path(__file__).parent / "recorded" / "events-without-kinds.jsonl"
VALUES: dict[str, Any] = {
    "step": 20,
    "node": "node2",
    "why": "x: y",
    "state": "failed",
    "title": "the disk is full",
    "because": "a",
    "message": "m",
    "files": "f",
    "text": "t",
}


@pytest.fixture
def old(tmp_path: Path) -> RunPaths:
    """A run folder with the events of a version that wrote sentences only."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    shutil.copyfile(RECORDED, paths.events_jsonl)
    return paths


def test_the_lines_of_an_older_run_are_the_same_events(old: RunPaths) -> None:
    read = [events.read(line) for line in event_log.lines(old)]
    assert [(entry.kind, entry.attempt) for entry in read] == [
        ("launched", None), ("attempt-started", 1), ("state", None), ("trouble", None), ("attempt-resumed", 2), ("state", None), ("state", None),
        ("state", None), ("waiting", None), ("checkpoint-unused", None), ("attempt-not-started", 3), ("attempt-stopped", 3), ("given-up", None),
        ("note", None), ("stopped", None),
    ]  # fmt: skip
    assert read[4].values["step"] == 0
    assert read[7].values == {"state": "failed", "title": "the disk of node2 is full"}


def test_an_older_run_is_shown_and_explained(old: RunPaths) -> None:
    lines = event_log.lines(old)
    assert event_row(lines[1]).text == "attempt 1 started: head node1 · port 29500"
    assert event_row(lines[3]).text == "trouble: all ranks have stood still for 5 s (training at step 4)"
    assert since(lines, 2)[0].text.startswith("cannot go on yet: node2: no answer within 10 s")
    assert since(lines, 1)[0].text.startswith("attempt 2 goes on after step 0: because all ranks")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_event_says_one_sentence_and_comes_back_from_its_file_and_from_its_sentence(tmp_path: Path, kind: Kind) -> None:
    made = event(kind, 2, **{key: value for key, value in VALUES.items() if f"{{{key}}}" in "".join(events._SENTENCES[kind])})
    paths = RunPaths(tmp_path / "run")
    event_log.append(paths, dataclasses.replace(made, values={**made.values, "nodes": ["a"]}))
    (line,) = event_log.lines(paths)
    assert line["what"] == made.sentence
    assert events.read(line) == dataclasses.replace(made, values={**made.values, "nodes": ["a"]})
    assert event_row(line).text == f"{made.sentence}: nodes a", "what the sentence says is not said again"
    bare = {"what": made.sentence}
    assert (events.read(bare).kind, events.read(bare).values) == (kind, made.values)


def test_why_goes_by_the_kind_and_not_by_words() -> None:
    story = [events.state("failed", 1, "x"), event("attempt-resumed", 2, step=5, because="attempt 9 started", nodes=["a"])]
    lines = [{"time": float(number), **entry.line()} for number, entry in enumerate(story)]
    assert [row.time for row in since(lines, 1)] == [1.0]
    renamed = [{**line, "what": "in other words"} for line in lines]
    assert [row.time for row in since(renamed, 1)] == [1.0]


def test_what_a_supervisor_on_a_node_has_written_down_keeps_its_kind() -> None:
    for made in (
        events.state("lost", 3),
        events.resumed(2, 5, is_program=True, because="x"),
        event("attempt-resumed", 2, step=5, because="x", nodes=["a"], left_out=["b"]),
    ):
        line = event_of({"time": 1.0, **made.line()})
        assert line is not None and events.read(line) == made


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"what": 5},
        {"what": ["x"]},
        {"event": "nonsense", "what": "x"},
        {"event": ["x"], "attempt": "x"},
        {"event": "state", "attempt": {}},
    ],
)
def test_a_damaged_line_is_an_event_of_no_meaning(line: dict[str, Any]) -> None:
    read: Event = events.read(line)
    assert read.attempt is None and not read.begins_an_attempt and not read.is_a_failure
    assert isinstance(events.text_of(line), str)


@pytest.mark.parametrize(("is_program", "step", "words"), [
    (False, 350, "attempt 2 goes on after step 350"), (False, 0, "attempt 2 goes on after step 0"),
    (True, 350, "attempt 2: the program was started again; it has step-350 before it"), (True, 0, "attempt 2: the program was started again; it has no checkpoint before it"),
])  # fmt: skip
def test_of_a_program_is_said_what_is_known(is_program: bool, step: int, words: str) -> None:
    """Whether it goes on from there is its own work."""
    line = events.resumed(2, step, is_program=is_program, because="x", nodes=["a"]).line()
    assert line["what"] == words and events.text_of(line) == f"{words}: because x · nodes a"
    assert events.read({**line, "time": 1.0}).attempt == events.read({"what": words}).attempt == 2 and events.read(line).begins_an_attempt
