"""A model that no formula of the planner knows: its memory is that of a real dry run on a node, by its config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.preflight import memory_dry_run
from homelab.controller.planning.model import families
from homelab.controller.planning.render import plan_table
from homelab.controller.planning.types import Plan
from homelab.shared.protocol import memory_items
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet
from tests.worker.model import tiny_models

GB = 10**9


def planned(kind: str, tmp_path: Path, *, room_bytes: int, method: dict[str, Any], is_on_nodes: bool = True) -> tuple[Plan, int]:
    """The plan of a tiny model of this kind after a dry run through the node's own verb, and how many weights its own build trains. `is_on_nodes`: else
    this machine alone has its config.json."""
    recipe = healthy.recipe(method=method)
    evidence = healthy.cpu(recipe)
    config = {**tiny_models.CONFIGS[kind], "model_type": kind}
    assert families.from_config(config) is None
    facts = {
        name: healthy.changed(of, model={**(of.model.model_dump() if of.model else {}), "config": config if is_on_nodes else None})
        for name, of in evidence.facts.items()
    }
    plan = builders.make_plan(evidence.cluster, recipe, facts)
    free = {rank.rank: (room_bytes, 1000) for rank in plan.ranks}
    trained = sum(parameter.numel() for parameter in tiny_models.build(kind).parameters())
    here = None if is_on_nodes else config
    return memory_dry_run.improve(FakeFleet(tmp_path), plan, recipe, facts, lambda text: None, free=free, config=here), trained


def sizes_of(plan: Plan, rank: int) -> dict[str, int]:
    memory = plan.ranks[rank].memory
    assert memory is not None
    return {item.name: item.size_bytes for item in memory.items}


@pytest.mark.parametrize("is_on_nodes", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_its_memory_is_that_of_a_real_dry_run(tmp_path: Path, is_on_nodes: bool) -> None:
    plan, total = planned("phimoe", tmp_path, room_bytes=100 * GB, method={"kind": "full"}, is_on_nodes=is_on_nodes)

    for rank in plan.ranks:
        sizes = sizes_of(plan, rank.rank)
        assert (
            rank.memory is not None and rank.memory.fits and rank.memory.dry_run is not None and rank.memory.dry_run.peak_bytes > 4 * total
        )
        assert (
            sizes[memory_items.GRADIENTS] == 4 * total <= sizes[memory_items.BASE_WEIGHTS] < 4 * total + 1000
            and sizes[memory_items.HELD] == 1000
        )
    (note,) = [warning for warning in plan.warnings if "the planner knows no formulas" in warning]
    assert "dry run on" in note and "its time is not known" in note
    assert "dry run" in plan_table.text(plan)


@pytest.mark.thorough
def test_a_rank_that_it_does_not_fit_is_named_and_the_trained_weights_are_told(tmp_path: Path) -> None:
    plan, _ = planned("gpt_neox", tmp_path, room_bytes=100_000_000, method={"kind": "lora", "rank": 2})

    assert sum("does not fit by the dry run" in warning for warning in plan.warnings) == len(plan.ranks)
    trained = sizes_of(plan, 0)[memory_items.ADAPTERS] // 4
    assert trained and any(f"which trains {trained:,} weights" in warning for warning in plan.warnings)


class Refusing:
    """A fleet whose nodes make no dry run, and keep what they were asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def agent(self, _name: str) -> Refusing:
        return self

    def ask(self, _verb: str, request: dict[str, Any], **_: Any) -> Any:
        self.asked = request
        raise HomelabError("no dry run here")


def test_a_model_that_is_on_no_node_is_tried_by_the_config_that_is_known_here() -> None:
    recipe, config, fleet = healthy.recipe(), {"model_type": "mixtral", "num_local_experts": 8}, Refusing()
    evidence = healthy.cpu(recipe)
    facts = {
        name: healthy.changed(of, model={**(of.model.model_dump() if of.model else {}), "config": None})
        for name, of in evidence.facts.items()
    }
    plan = builders.make_plan(evidence.cluster, recipe, facts)
    after = memory_dry_run.improve(fleet, plan, recipe, facts, lambda text: None, config=config)  # type: ignore[arg-type]
    assert fleet.asked["config"] == config and any("no dry run here" in warning for warning in after.warnings)
    fleet.asked = {}
    assert memory_dry_run.improve(fleet, plan, recipe, facts, lambda text: None) == plan and not fleet.asked  # type: ignore[arg-type]
