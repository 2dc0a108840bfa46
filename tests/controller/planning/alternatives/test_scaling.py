"""The curve over numbers of machines: each point is the plan of so many, copies are as the original, and what was not measured is said."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from homelab.controller.base.errors import InputError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning import plan as planning
from homelab.controller.planning.alternatives import scaling, what_if
from homelab.controller.planning.alternatives.scaling import ScalingCurve, ScalingPoint
from homelab.controller.planning.render import scaling_table
from homelab.controller.planning.time.network_cost import all_reduce_s
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import all_measured, file, with_file

MEASURED = all_measured(healthy.cpu(healthy.recipe()), (4e-3, 1e-3, 2e-3))
ROWS = {"global_batch": 36, "steps": 10, "learning_rate": 1e-3}


def curve(
    seen: Evidence, counts: str, recipe: Recipe | None = None, *, like: str | None = None, rates: Any = None, assumed: bool = False
) -> ScalingCurve:
    inputs = builders.plan_inputs(seen.cluster, recipe or healthy.recipe(train=ROWS), seen.facts, throughputs=rates or {})
    return scaling.curve(inputs, scaling.parse_counts(counts), lambda of: planning.make(of), like=like, is_wire_assumed=assumed)


@pytest.mark.parametrize(
    ("text", "counts"), [("1..4", (1, 2, 3, 4)), ("2,4,8", (2, 4, 8)), ("8, 2,2", (2, 8)), ("3", (3,)), ("5..5", (5,))]
)
def test_numbers_of_machines(text: str, counts: tuple[int, ...]) -> None:
    assert scaling.parse_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "words", "edit"),
    [
        ("10..1", "begins with more machines than it ends with", "--what-if-nodes 1..10"),
        ("0..3", "at least one machine", "--what-if-nodes 1..3"),
        ("0,2", "at least one machine", "--what-if-nodes 2"),
        ("0", "at least one machine", "--what-if-nodes 1..64"),
        ("1..1000", "more than 64 machines", "--what-if-nodes 1..64"),
        ("2,4,900", "more than 64 machines", "--what-if-nodes 2,4"),
        ("70..80", "more than 64 machines", "--what-if-nodes 1..64"),
        ("999999..1", "begins with more", "--what-if-nodes 1..999999"),
        ("1...4", "is not a number of machines", "1..10"),
        ("-1", "is not a number of machines", "1..10"),
        ("many", "is not a number of machines", "2,4,8"),
        ("1..99999999999999999999", "is not a number of machines", "1..10"),
    ],
)
def test_numbers_that_cannot_be(text: str, words: str, edit: str) -> None:
    with pytest.raises(InputError) as caught:
        scaling.parse_counts(text)
    assert words in caught.value.message and edit in str(caught.value.hint) and "--what-if-nodes" in caught.value.where


def test_those_that_are_there_come_first_and_the_plan_is_theirs() -> None:
    found = curve(MEASURED, "1..5")
    assert [point.nodes for point in found.points[:3]] == [("laptop",), ("laptop", "oldtower"), ("laptop", "oldtower", "tower")], (
        "fastest first"
    )
    assert found.like == "oldtower" and "middle one of 3" in found.like_because
    assert found.points[4].nodes[3:] == ("oldtower-copy-1", "oldtower-copy-2") and [point.copies for point in found.points] == [
        0,
        0,
        0,
        1,
        2,
    ]
    plan = builders.make_plan(MEASURED.cluster, healthy.recipe(train=ROWS), MEASURED.facts)
    assert plan.time and found.points[2].step_s == plan.time.step_s and found.points[2].hours == plan.time.hours
    rates = [point.tokens_per_s or 0 for point in found.points]
    assert rates == sorted(rates) and found.points[1].gain == pytest.approx(rates[1] / rates[0] - 1) and found.points[0].gain is None
    assert found.points[3].ranks == 4 and found.points[3].strategy == "ddp" and found.points[3].global_batch == 36
    fast = curve(MEASURED, "4", like="laptop").points[0]
    assert fast.nodes[3] == "laptop-copy-1" and (fast.tokens_per_s or 0) > rates[3], "a copy computes as fast as its original"


def test_what_is_measured_and_what_is_not() -> None:
    bases = [point.basis for point in curve(MEASURED, "1..4").points]
    assert bases == ["measured", "scaled", "measured", "scaled"], "the wire was measured with three ranks"
    wire = [point.wire_s for point in curve(MEASURED, "1..4").points]
    assert wire[0] == 0 and wire[2] == 0.05
    assert wire[3] == pytest.approx(0.05 * all_reduce_s(1, 4, 1) / all_reduce_s(1, 3, 1)), "by the strategy's rule"
    assert [point.basis for point in curve(MEASURED, "1,3", assumed=True).points] == ["measured", "scaled"], "a wire that is not there"
    alone = MEASURED
    for name, token_s in zip(healthy.NAMES, (4e-3, 1e-3, 2e-3), strict=True):
        alone = with_file(alone, name, file(name, token_s=token_s, world_size=1, sync_s=None))
    assert [point.basis for point in curve(alone, "1..3").points] == ["measured", "guess", "guess"], "1 Gbit/s is assumed"
    pairs = {(source, target): 50e6 for source in healthy.NAMES for target in healthy.NAMES if source != target}
    slow = curve(alone, "1..4", rates=pairs)
    assert [point.basis for point in slow.points] == ["measured", "scaled", "scaled", "scaled"], "reckoned from measured bytes per second"
    slow_wire, assumed_wire = slow.points[3].wire_s, curve(alone, "4").points[0].wire_s
    assert slow_wire and assumed_wire and slow_wire == pytest.approx(assumed_wire * 117.6 / 50), (
        "a copy's wire is as slow as its original's"
    )
    fast_wire = curve(alone, "4", rates=dict.fromkeys(pairs, 294e6)).points[0].wire_s
    assert fast_wire and fast_wire == pytest.approx(assumed_wire * 117.6 / 294), "or as fast"
    of_four = curve(with_sync(0.05, world_size=4), "4").points[0]
    assert of_four.wire_s == pytest.approx(0.05) and of_four.basis == "scaled", "the wire of four ranks was measured, but a copy was not"
    cards = curve(healthy.gpu(healthy.recipe()), "1..4")
    assert {point.basis for point in cards.points} == {"guess"}, "data sheets"


@pytest.mark.thorough
def test_where_it_turns_and_what_limits_it() -> None:
    by_wire = curve(with_sync(2.0), "1..8")
    assert (
        by_wire.turn is not None
        and f"after {by_wire.turn} another machine adds less than 5%" in by_wire.because
        and "the wire" in by_wire.because
    )
    by_rows = curve(with_sync(0.001), "1..12", healthy.recipe())
    assert by_rows.turn is not None and by_rows.turn < 12 and "rows per batch: 12 rows" in by_rows.because
    fixed = curve(MEASURED, "1..3", healthy.recipe(train=ROWS, parallel={"shares": "equal"}))
    assert "the slowest rank" in (fixed.points[2].limit or "")
    assert "ranks that wait for each other" in (curve(with_sync(0.001, wait_s=2.0), "3").points[0].limit or "")
    pays = curve(with_sync(0.001), "1..4")
    assert pays.turn is None and pays.because.startswith("up to 4 every machine helps")


def with_sync(sync_s: float, world_size: int = 3, wait_s: float = 0.0) -> Evidence:
    seen, sync = MEASURED, {"strategy": "ddp", "compress": "none", "world_size": world_size, "sync_s": sync_s, "wait_s": wait_s}
    for name, token_s in zip(healthy.NAMES, (4e-3, 1e-3, 2e-3), strict=True):
        seen = with_file(seen, name, file(name, token_s=token_s, syncs=[sync]))
    return seen


def test_a_pause_in_the_curve_is_no_turn() -> None:
    # Twelve rows: four and five ranks take as long, six do not.
    rates = {3: 300.0, 4: 400.0, 5: 400.0, 6: 600.0, 7: 605.0, 8: 610.0}
    points = [
        ScalingPoint(machines=count, nodes=(), copies=0, tokens_per_s=rate, limit="the wire (30% of the step)")
        for count, rate in rates.items()
    ]
    assert scaling._turn(points[:4]) == (
        None,
        "up to 6 every machine helps (5% or more for each); the largest cost there: the wire (30% of the step)",
    )
    assert scaling._turn(points)[0] == 6
    many = [ScalingPoint(machines=count, nodes=(), copies=0, tokens_per_s=100.0 * count, limit="nothing") for count in range(15, 30)]
    assert scaling._turn(many) == (21, "after 21 another machine adds less than 5%, because there are so many already")


def test_more_ranks_than_rows_is_said() -> None:
    found = curve(MEASURED, "11..14", healthy.recipe())
    assert [point.error is None for point in found.points] == [True, True, False, False]
    assert "a global batch of 12 samples cannot feed 13 ranks" in (found.points[2].error or "")
    shown = text(found)
    assert "no plan" in shown and "- 13: a global batch of 12 samples cannot feed 13 ranks" in shown


def text(found: ScalingCurve, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(scaling_table.table(found))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_the_table_fits_a_terminal_and_its_bars_grow() -> None:
    found = curve(with_sync(0.001), "1,2,3,6")
    assert all(len(line) <= 80 and "…" not in line for line in text(found).splitlines())
    shown = text(found, 110)
    lines = [line for line in shown.splitlines() if "█" in line]
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert "copy of oldtower" in lines[3] and "scaled" in lines[3] and "measured" in lines[2]
    assert "The strategy is ddp everywhere." in shown


def test_a_recipe_that_names_machines_is_freed_of_them() -> None:
    found = curve(
        MEASURED,
        "1..4",
        healthy.recipe(train=ROWS, parallel={"shares": {"tower": 6, "laptop": 4, "oldtower": 2}}, recovery={"min_nodes": 3}),
    )
    assert not [point for point in found.points if point.error] and "shares by speed" in found.notes[0]


def test_a_node_to_copy_that_is_not_there_and_speeds_that_nobody_knows() -> None:
    with pytest.raises(InputError, match='Did you mean "laptop"'):
        curve(MEASURED, "1..4", like="labtop")
    with pytest.raises(InputError, match="there is no curve") as caught:
        curve(healthy.cpu(healthy.recipe()), "1..4")
    assert "homelab launch" in str(caught.value.hint)


def test_together_with_another_wire() -> None:
    changes = what_if.parse(["wire=100mbit"], MEASURED.cluster, device="cpu")
    facts, rates = what_if.with_wire(changes, MEASURED.cluster, MEASURED.facts, {})
    slow = curve(replace(MEASURED, facts=facts), "1..4", rates=rates, assumed=True)
    now = curve(MEASURED, "1..4")
    assert [point.wire_s for point in slow.points[1:]] == pytest.approx([10 * (point.wire_s or 0) for point in now.points[1:]])
