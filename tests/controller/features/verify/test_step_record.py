"""What is wrong with a record, in words that name the step; and windows that its author cannot choose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from homelab.controller.features.verify.step_record import StepRecord, Window, missed_chance
from homelab.shared.protocol import chain

pytestmark = pytest.mark.timeout(60)
Lines = list[dict[str, Any]]


def written(steps: int = 12, every: int = 4, *, salt: str = "") -> Lines:
    """The lines of a run that keeps each `every`-th checkpoint."""
    lines: Lines = [{"kind": "start", "step": 0, "recipe_hash": "r1", "precision": "fp32", "versions": {"torch": "2.13.0"}, "salt": salt}]
    for step in range(1, steps + 1):
        lines.append(
            {
                "kind": "train",
                "step": step,
                "loss": 5 - step / 7,
                "learning_rate": 1e-3,
                "batch": f"{step:016x}",
                "passes": "0011",
                "attempt": 1,
            }
        )
        if step % every == 0:
            lines.append({"kind": "kept", "step": step, "sha256": f"{step:064x}", "devices": ["CPU"]})
    return chained(lines)


def chained(lines: Lines) -> Lines:
    end, done = "", []
    for line in lines:
        end = chain.link(end, line)
        done.append({**line, "chain": end})
    return done


def record(lines: Lines) -> StepRecord:
    return StepRecord("".join(json.dumps(line) + "\n" for line in lines))


def place(lines: Lines, step: int) -> int:
    return next(number for number, line in enumerate(lines) if line["kind"] == "train" and line["step"] == step)


def test_the_largest_batch_of_a_recipe_leaves_the_record_readable() -> None:
    rows = 1_000_000  # AtMost of global_batch
    cuts = [[range(first, rows, 1000) for first in range(1000)]]
    passes = chain.passes_text(cuts, rows)
    lines = chained([{**line, "passes": passes} if line["kind"] == "train" else line for line in written(steps=1, every=1)])
    assert len(passes) == 2 * rows and record(lines).faults("") == []


def changed(lines: Lines) -> Lines:
    lines[place(lines, 7)]["loss"] += 1e-9
    return lines


def swapped(lines: Lines) -> Lines:
    first, second = place(lines, 6), place(lines, 7)
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def without(lines: Lines) -> Lines:
    del lines[place(lines, 7)]
    return lines


@pytest.mark.parametrize(("edit", "step", "said"), [
    (changed, 7, "the line of step 7 was changed"),
    (swapped, 7, "lines before that of step 7 are missing or stand elsewhere"),
    (without, 8, "lines before that of step 8 are missing"),
    (lambda lines: lines[:-3], 10, "the record ends after step 10 with the chain"),
    (lambda lines: chained(lines[:-3]), 10, "the model card says"),
    (lambda lines: [*lines[:5], {"kind": "train", "step": "x"}, *lines[5:]], 4, "the line after that of step 4 is damaged"),
])  # fmt: skip
def test_an_edit_is_named_with_its_step(edit: Callable[[Lines], Lines], step: int, said: str) -> None:
    honest = written()
    assert record(honest).faults(chain.end_of(honest), least_steps=12) == []
    (fault,) = record(edit(written())).faults(chain.end_of(honest), least_steps=12)
    assert fault.step == step and said in fault.text, fault


def test_a_cut_end_without_a_card_shows_where_a_later_checkpoint_is_known_and_text_after_the_end_is_no_line() -> None:
    (fault,) = record(written()[:-3]).faults("", least_steps=12)
    assert fault.text == "the record ends after step 10, and the run has done step 12"
    assert record(written()[:-3]).faults("", least_steps=10) == []
    (fault,) = StepRecord("".join(json.dumps(line) + "\n" for line in written()) + "{half a li").faults("")
    assert "no JSON object" in fault.text


def test_the_windows_lie_between_kept_checkpoints_and_the_chain_chooses_them() -> None:
    honest = record(written(20))
    assert list(map(str, honest.windows())) == ["0..4", "4..8", "8..12", "12..16", "16..20"]
    assert honest.chosen(9) == honest.windows() and honest.chosen(2) == record(written(20)).chosen(2)
    chosen = Counter(str(window) for number in range(400) for window in record(written(20, salt=str(number))).chosen(2))
    assert set(chosen) == set(map(str, honest.windows())) and all(110 < count < 210 for count in chosen.values()), chosen
    assert record([{"kind": "train", "step": 1, "loss": 2.0}]).end == "", "of an older version"
    assert record(written(3)).windows() == []


def test_the_odds_are_those_of_drawing_without_putting_back() -> None:
    assert missed_chance(3, 12, 1) == pytest.approx(9 / 12) and missed_chance(12, 12, 1) == 0.0
    assert missed_chance(45, 1000, 50) == pytest.approx(0.95**45, rel=0.06), "(1 - f)^k where there are many"


@pytest.mark.parametrize("lie", [None, True, -1, 10**30, float("nan"), "", "x" * 30_000, "\x1b]52;c;x\x07", [], {}, [[]] * 5])
@pytest.mark.parametrize(
    "key", ["kind", "step", "loss", "learning_rate", "batch", "passes", "sha256", "chain", "precision", "versions", "recipe_hash"]
)
def test_a_node_that_writes_anything_is_told_from_an_honest_one_without_a_crash(key: str, lie: Any) -> None:
    for number in (0, 3, 5):
        lines = written()
        if lines[number].get(key, MISSING) == lie:
            continue
        lines[number][key] = lie
        found = record(lines)
        (fault,) = found.faults(chain.end_of(written()))
        assert len(fault.text) < 200 and fault.text.isprintable() and found.chosen(2) is not None
        assert found.start is None or len(str(found.start)) < 10_000


MISSING = object()


def test_a_window_is_written_as_a_person_writes_it() -> None:
    assert str(Window(begin=100, end=120)) == "100..120"
