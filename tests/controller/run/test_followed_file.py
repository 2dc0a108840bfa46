"""Reading what is new of a file that others append to, cut, damage and replace gives what reading all of it anew gives."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.controller.run import followed_file
from homelab.controller.run.followed_file import FollowedFile
from homelab.controller.run.metric_keys import KnownKeys, Line, key
from homelab.controller.run.metrics import Gathered, lines_of
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.step_set import StepSet
from homelab.controller.run.undone_lines import Undone
from tests.controller.run.test_gathered import kept, train

pytestmark = pytest.mark.timeout(60)
NEW_ATTEMPT = {1: 0, 2: 5, 3: 8}


def undone(lines: Sequence[Line], resumed: Mapping[int, int]) -> set[Any]:
    """The keys of lines that a later attempt has replaced, from all lines at once."""
    trained = {line["attempt"] for line in lines if line["kind"] == "train" and line["attempt"] in resumed}
    newest: dict[Any, int] = {}
    for line in lines:
        if line["kind"] in ("train", "eval"):
            place = (line["kind"], line["rank"], line["step"])
            newest[place] = max(newest.get(place, 0), line["attempt"])
    return {
        key(line) for line in lines
        if (line["kind"] in ("train", "eval", "save", "shares") and any(later > line["attempt"] and line["step"] > resumed[later] for later in trained))
        or newest.get((line["kind"], line["rank"], line["step"]), line["attempt"]) > line["attempt"]
    }  # fmt: skip


LINES = st.builds(
    lambda kind, attempt, rank, step: {**train(attempt, step, rank), "kind": kind},
    st.sampled_from(["train", "train", "train", "eval", "save", "shares", "note"]), st.integers(1, 3), st.integers(0, 1), st.integers(0, 12),
)  # fmt: skip
PARTS = st.lists(LINES, max_size=8)
RESUMED = st.sampled_from([{1: 0}, {1: 0, 2: 5}, NEW_ATTEMPT])
# What happens to the file: (name, argument).
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), PARTS), st.tuples(st.just("half"), st.text("ab{}\n", max_size=9)), st.tuples(st.just("cut"), st.integers(0, 3000)),
        st.tuples(st.just("replace"), PARTS), st.tuples(st.just("rewrite"), PARTS), st.tuples(st.just("gather"), st.tuples(PARTS, RESUMED)),
        st.tuples(st.just("long"), st.integers(1, 900)), st.tuples(st.just("remove"), st.none()), st.tuples(st.just("look"), st.none()),
    ),
    max_size=14,
)  # fmt: skip


def text_of(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def perform(act: str, argument: Any, paths: RunPaths, gathered: Gathered) -> None:
    file = paths.metrics_jsonl
    if act in ("append", "half", "long"):
        with file.open("a") as stream:
            stream.write(text_of(argument) if act == "append" else argument if act == "half" else "x" * argument)
    elif act == "cut" and file.exists():
        os.truncate(file, min(argument, file.stat().st_size))
    elif act == "replace":
        beside = file.with_name("beside")
        beside.write_text(text_of(argument))
        beside.replace(file)
    elif act == "rewrite":
        file.write_text(text_of(argument))
    elif act == "remove":
        file.unlink(missing_ok=True)
    elif act == "gather":
        gathered.add(*argument)
    gathered.refresh()


@settings(max_examples=200, deadline=None)
@given(ACTS)
def test_what_is_new_and_what_was_known_is_what_is_there(acts: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(followed_file, "MOST_LINE_BYTES", 700)
        patch.setattr(followed_file, "_CHUNK_BYTES", 100)
        paths = RunPaths(Path(folder))
        gathered, lines = kept(paths)
        for act, argument in acts:
            if act != "look":
                perform(act, argument, paths, gathered)
            anew = kept(paths)[1]
            assert lines == anew, act
            for attempt in (1, 2, 3):
                assert sum(gathered.known.counts(attempt).values()) == sum(line["attempt"] == attempt for line in anew)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PARTS, RESUMED), max_size=6))
def test_of_every_step_one_line_is_left(looks: list[tuple[list[Line], dict[int, int]]]) -> None:
    """As from all lines at once: what a later attempt has done again goes, and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        gathered, _ = kept(paths)
        expected: dict[Any, Line] = {}
        for new, resumed in looks:
            gathered.add(new, resumed)
            for line in new:
                expected.setdefault(key(line), line)
            gone = undone(list(expected.values()), resumed)
            expected = {name: line for name, line in expected.items() if name not in gone}
            assert list(lines_of(paths)) == list(expected.values())


def test_thousands_of_attempts_are_compared_in_the_time_that_it_takes_to_know_them() -> None:
    """It was their number squared, at every look at a run."""
    attempts, steps = 3000, 2
    lines = [train(number, number * steps + step, rank) for number in range(attempts) for step in range(steps) for rank in (0, 1)]
    resumed = {number: number * steps for number in range(attempts)}
    began_s = time.process_time()
    known, newer = KnownKeys(lines), KnownKeys([train(attempts, attempts * steps, 0)])
    built_s = time.process_time()
    undone = Undone(resumed, known, newer)
    assert not undone.has_known and not any(line in undone for line in lines)
    assert time.process_time() - built_s < 5 * (built_s - began_s)
    assert Undone({**resumed, attempts: 5}, known, newer).has_known


def test_keys_are_undone_as_all_lines_at_once_say() -> None:
    lines = [
        train(attempt, step, rank) for attempt, first in NEW_ATTEMPT.items() for step in range(first + 1, first + 7) for rank in (0, 1)
    ]
    known = KnownKeys(lines)
    gone = undone(lines, NEW_ATTEMPT)
    assert gone and {key(line) for line in lines if line in Undone(NEW_ATTEMPT, known)} == gone


def read(follow: FollowedFile, begin: Callable[[], None] = lambda: None) -> list[bytes]:
    return list(follow.new_lines(begin))


def test_a_read_costs_what_is_new(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    costs = []
    for count in (1000, 20_000):
        file.write_bytes(b"a line of a run\n" * count)
        follow = FollowedFile(file)
        assert len(read(follow)) == count
        before = follow.bytes_read
        with file.open("ab") as stream:
            stream.write(b"one more\nand a half")
        assert read(follow) == [b"one more"]
        costs.append(follow.bytes_read - before)
    assert costs[0] == costs[1] < 20_000


def test_a_line_without_an_end_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    follow = FollowedFile(file)
    for _ in range(3):
        with file.open("ab") as stream:
            stream.write(b"x" * (followed_file.MOST_LINE_BYTES + 5))
        assert read(follow) == []
    before = follow.bytes_read
    with file.open("ab") as stream:
        stream.write(b"\nshort\n")
    assert read(follow) == [b"short"] and follow.bytes_read - before < 20_000


def test_a_file_that_has_grown_past_its_old_size_after_a_cut_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    follow, begun = FollowedFile(file), []
    file.write_bytes(b"old\n" * 10)
    read(follow)
    file.write_bytes(b"new\n" * 20)
    assert read(follow, lambda: begun.append(1)) == [b"new"] * 20 and begun == [1]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 30), st.integers(0, 30))
def test_a_set_of_steps_is_a_set(steps: list[int], first: int, last: int) -> None:
    kept_steps, plain = StepSet(), set[int]()
    for step in steps:
        assert kept_steps.add(step) == (step not in plain)
        plain.add(step)
    assert [step in kept_steps for step in range(32)] == [step in plain for step in range(32)]
    assert kept_steps.covers(first, last) == plain.issuperset(range(first, last + 1))
    other = StepSet()
    other.add(first)
    other.add(last)
    assert kept_steps.meets(other) == other.meets(kept_steps) == bool({first, last} & plain)
