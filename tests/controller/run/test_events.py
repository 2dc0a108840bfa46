"""Events are values: programs go by kind, attempt and numbers; the sentence is for people."""

from __future__ import annotations

import dataclasses
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


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_event_says_one_sentence_and_comes_back_from_its_file(tmp_path: Path, kind: Kind) -> None:
    made = event(kind, 2, **{key: value for key, value in VALUES.items() if f"{{{key}}}" in "".join(events._SENTENCES[kind])})
    paths = RunPaths(tmp_path / "run")
    event_log.append(paths, dataclasses.replace(made, values={**made.values, "nodes": ["a"]}))
    (line,) = event_log.lines(paths)
    assert line["what"] == made.sentence
    assert events.read(line) == dataclasses.replace(made, values={**made.values, "nodes": ["a"]})
    assert event_row(line).text == f"{made.sentence}: nodes a", "what the sentence says is not said again"


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
    (False, 350, "attempt 2 continues after step 350"), (False, 0, "attempt 2 continues after step 0"),
    (True, 350, "attempt 2: the program was started again; it had step-350"), (True, 0, "attempt 2: the program was started again; it had no checkpoint"),
])  # fmt: skip
def test_of_a_program_is_said_what_is_known(is_program: bool, step: int, words: str) -> None:
    """Whether it goes on from there is its own work."""
    line = events.resumed(2, step, is_program=is_program, because="x", nodes=["a"]).line()
    assert line["what"] == words and events.text_of(line) == f"{words}: because x · nodes a"
    assert events.read({**line, "time": 1.0}).attempt == 2 and events.read(line).begins_an_attempt
