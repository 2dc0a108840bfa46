"""A cut of a model that trains is changed where what was measured since then pays for the restart, and not otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from homelab.controller.checks.evidence import Evidence
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.plan import make
from homelab.controller.planning.strategy.pipeline import recut
from homelab.controller.planning.types import Plan
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import all_measured

STEPS = 1000
RECIPE = builders.recipe(parallel={"strategy": "pipeline"}, train={"global_batch": 12, "learning_rate": 1e-4, "steps": STEPS})


def inputs_of(seen: Evidence, **changes: Any) -> PlanInputs:
    return builders.plan_inputs(seen.cluster, RECIPE, seen.facts, **changes)


def planned(seen: Evidence) -> Plan:
    return builders.make_plan(seen.cluster, RECIPE, seen.facts)


def layers_of(plan: Plan) -> dict[str, int]:
    return {rank.node: rank.stage.end - rank.stage.begin for rank in plan.ranks if rank.stage}


NEVER_MEASURED = healthy.cpu(RECIPE)
MEASURED = all_measured(NEVER_MEASURED, (1e-3, 2e-3, 4e-3))


def test_it_says_the_cut_that_the_next_plan_makes() -> None:
    running, following = planned(NEVER_MEASURED), planned(MEASURED)
    assert layers_of(running) != layers_of(following)
    better = recut.faster(inputs_of(MEASURED, resume_step=100), running, restart_s=60)
    assert better is not None and following.time is not None
    assert better.faster_step_s == pytest.approx(following.time.step_s, rel=0.05) and better.faster_step_s < 0.9 * better.step_s
    assert better.saved_s == pytest.approx(900 * (better.step_s - better.faster_step_s) - 60)
    for node, count in layers_of(following).items():
        assert f"{count} on {node}" in better.faster_layers and f"{layers_of(running)[node]} on {node}" in better.layers
    assert better.layers in better.because and better.faster_layers in better.because


@pytest.mark.parametrize(
    ("running", "seen", "step", "restart_s"),
    [
        pytest.param(MEASURED, MEASURED, 100, 60.0, id="it is cut so already"),
        pytest.param(NEVER_MEASURED, MEASURED, STEPS - 1, 60.0, id="one step is left"),
        pytest.param(NEVER_MEASURED, MEASURED, 100, 1e6, id="a restart takes longer than it saves"),
        pytest.param(NEVER_MEASURED, NEVER_MEASURED, 100, 60.0, id="nothing was measured"),
        pytest.param(MEASURED, all_measured(NEVER_MEASURED, (1.05e-3, 1.95e-3, 4.1e-3)), 100, 60.0, id="noise"),
        pytest.param(NEVER_MEASURED, all_measured(healthy.cpu(RECIPE, names=healthy.NAMES[:2]), (1e-3, 2e-3)), 100, 60.0, id="a node does not answer"),
    ],
)  # fmt: skip
def test_it_stays_as_it_is(running: Evidence, seen: Evidence, step: int, restart_s: float) -> None:
    assert recut.faster(inputs_of(seen, resume_step=step), planned(running), restart_s) is None


def test_the_same_layers_are_no_other_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose memory ran out have other micro-batches than planned, and would again after every restart: it would never end."""
    monkeypatch.setattr(recut, "_step_s", lambda *_: 100.0)
    assert recut.faster(inputs_of(MEASURED, resume_step=100), planned(NEVER_MEASURED), 60.0) is not None
    assert recut.faster(inputs_of(MEASURED, resume_step=100), planned(MEASURED), 60.0) is None


def test_a_run_that_is_not_cut_has_nothing_to_cut() -> None:
    recipe = builders.recipe(train={"global_batch": 12, "learning_rate": 1e-4, "steps": STEPS})
    running = builders.make_plan(MEASURED.cluster, recipe, MEASURED.facts)
    assert recut.faster(builders.plan_inputs(MEASURED.cluster, recipe, MEASURED.facts, resume_step=100), running, 60.0) is None


def test_what_its_own_ranks_hold_is_not_counted_against_them() -> None:
    """While it trains nearly all memory is in use, by itself."""
    running = planned(NEVER_MEASURED)
    while_it_trains = MEASURED
    for name in healthy.NAMES:
        while_it_trains = healthy.with_facts(while_it_trains, name, system={"memory_available_bytes": 2**20})
    expected = recut.faster(inputs_of(MEASURED, resume_step=100), running, 60.0)
    assert expected is not None and recut.faster(inputs_of(while_it_trains, resume_step=100), running, 60.0) == expected


def ranges_of(plan: Plan) -> dict[tuple[str, int], range]:
    return {(rank.node, rank.local_rank): range(rank.stage.begin, rank.stage.end) for rank in plan.ranks if rank.stage}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_stay_where_they_were_where_that_costs_nothing(order: tuple[int, ...]) -> None:
    """A layer that moves is read and quantised anew, and two rounds of measuring are never the same."""
    alike = all_measured(NEVER_MEASURED, (1.004e-3, 0.997e-3, 1e-3))
    begun = make(inputs_of(alike))
    nodes = list(ranges_of(begun))
    before = {
        nodes[rank]: layers for rank, layers in zip(order, sorted(ranges_of(begun).values(), key=lambda layers: layers.start), strict=True)
    }
    again = make(inputs_of(alike, last_layers=before))
    moved = sum(len(set(layers) - set(before[rank])) for rank, layers in ranges_of(again).items())
    assert moved <= 2 and again.time is not None and begun.time is not None
    assert again.time.step_s <= begun.time.step_s * 1.021


def test_layers_move_where_that_is_faster() -> None:
    equal = ranges_of(planned(NEVER_MEASURED))
    moved, free = make(inputs_of(MEASURED, last_layers=equal)), make(inputs_of(MEASURED))
    assert ranges_of(moved) != equal and moved.time is not None and free.time is not None
    assert moved.time.step_s <= free.time.step_s * 1.021
