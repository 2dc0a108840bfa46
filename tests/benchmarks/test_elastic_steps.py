"""When training went on after a fault: the reckoning behind the comparison with torchrun."""

from __future__ import annotations

import json

from scripts.benchmarks.elastic.steps import GoesOn, first_after, parse

FAULT_AT = 1000.0


def lines(*steps: tuple[int, float, float], ranks: int = 3) -> str:
    """(step, time, started_at), as seconds after the fault."""
    return "".join(
        json.dumps({"step": step, "ranks": ranks, "time": FAULT_AT + time, "started_at": FAULT_AT + start}) + "\n"
        for step, time, start in steps
    )


BEFORE = lines((96, -0.2, -30.0), (97, -0.1, -30.0))


def test_step_in_flight_does_not_count() -> None:
    assert first_after(parse(BEFORE + lines((98, 0.2, -30.0))), FAULT_AT) is None


def test_first_step_of_new_workers_counts_wherever_it_stands() -> None:
    new = lines((82, 14.6, 4.25), (81, 14.5, 4.25), ranks=2)
    found = first_after(parse(new + BEFORE + lines((98, 0.2, -30.0))), FAULT_AT)
    assert found == GoesOn(seconds=14.5, step=81, ranks=2, new_workers=True, worker_start_s=10.25)


def test_new_workers_count_at_once() -> None:
    found = first_after(parse(BEFORE + lines((81, 3.0, 0.5))), FAULT_AT)
    assert found is not None
    assert (found.seconds, found.new_workers) == (3.0, True)


def test_same_workers_that_go_on_after_a_pause_count() -> None:
    found = first_after(parse(BEFORE + lines((98, 0.2, -30.0), (99, 61.5, -30.0), (100, 61.6, -30.0))), FAULT_AT)
    assert found == GoesOn(seconds=61.5, step=99, ranks=3, new_workers=False, worker_start_s=None)


def test_unfinished_lines_are_none() -> None:
    whole = lines((81, 14.5, 4.25))
    assert parse(whole + whole[:30]) == parse(whole)
    assert parse(whole[:30] + "\n" + whole + '{"step": 3}\n[1]\n') == parse(whole)
