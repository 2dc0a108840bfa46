"""The chain of a record: whatever is edited in it afterwards shows at its line."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.shared.protocol import chain


def record(steps: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "recipe_hash": "r1"}]
    lines += [
        {"kind": "train", "step": step, "loss": 5.0 - step / 7, "grad_norm": None, "batch": f"{step:016x}"} for step in range(1, steps + 1)
    ]
    chained, end = [], ""
    for line in lines:
        end = chain.link(end, line)
        chained.append({**line, "chain": end})
    return json.loads(json.dumps(chained))


def test_a_record_that_was_written_and_read_is_whole() -> None:
    lines = record(20)
    assert chain.first_break(lines) is None and chain.end_of(lines) == lines[-1]["chain"] and len(chain.end_of(lines)) == 32
    assert chain.first_break(lines[:-3]) is None and chain.end_of(lines[:-3]) != chain.end_of(lines), (
        "a cut end shows beside the card alone"
    )
    assert chain.end_of([]) == chain.end_of([{"kind": "train", "step": 1, "loss": 2.0}]) == "", "of an older version"
    assert chain.of_card("# a\n\n" + chain.card_line("ab12") + " more\n") == "ab12" and chain.of_card("# a\n") == ""


@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(1, 20),
    digit=st.floats(1e-9, 1.0),
    other=st.integers(1, 20),
    how=st.sampled_from(["change", "swap", "drop", "double"]),
)
def test_any_edit_is_found_at_the_first_line_that_it_touches(place: int, digit: float, other: int, how: str) -> None:
    lines = record(20)
    expected = place
    if how == "change":
        lines[place]["loss"] += digit
    elif how == "swap":
        other = other if other != place else place % 20 + 1
        lines[place], lines[other] = lines[other], lines[place]
        expected = min(place, other)
    elif how == "drop":
        place = min(place, 19)
        del lines[place]
        expected = place
    else:
        lines.insert(place, lines[place - 1])
    assert chain.first_break(lines) == expected


def test_the_passes_of_a_batch_are_one_mark_a_row() -> None:
    assert chain.passes_text([[[0, 3], [1]], [], [[2, 4]]], 5) == "01202"
    assert chain.passes_of("01202", 5) == [[0, 3], [1], [2, 4]] and chain.passes_of("012", 5) == chain.passes_of("012-2", 5) == []
    assert chain.passes_text([[[2, 4]], [[1], [0, 3]]], 5) == "01202", "the same passes on other ranks, in another order"
    many = chain.passes_text([[[row] for row in range(40)]], 40)
    assert len(many) == 80 and many[:4] == "0001" and many[-2:] == "13"
    assert chain.passes_of(many, 40) == [[row] for row in range(40)]
    assert len(long := chain.passes_text([[[row] for row in range(1300)]], 1300)) == 16 and chain.passes_of(long, 1300) == []
    assert chain.batch_digest([1, 2]) != chain.batch_digest([2, 1]) and len(chain.batch_digest(range(64))) == 16
