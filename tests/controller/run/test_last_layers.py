"""Which layers of a pipeline each rank had: in the newest attempt that it was in, whatever others came after it."""

from __future__ import annotations

from pathlib import Path

from homelab.controller.planning.types import Plan
from homelab.controller.run import run_folder, store
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.controller.checks import healthy

RECIPE = builders.recipe(parallel={"strategy": "pipeline"}, train={"global_batch": 12, "learning_rate": 1e-4, "steps": 10})


def planned(*nodes: str) -> Plan:
    seen = healthy.cpu(RECIPE, names=nodes)
    return builders.make_plan(seen.cluster, RECIPE, seen.facts)


def test_a_node_that_was_away_is_still_known_by_the_attempt_before(tmp_path: Path) -> None:
    all_of_them, without_last = planned(*healthy.NAMES), planned(*healthy.NAMES[:2])
    paths = RunPaths(tmp_path / all_of_them.run)
    for attempt, plan in ((1, all_of_them), (2, without_last)):
        store.write_json(paths.plan_json(attempt), plan.model_copy(update={"attempt": attempt}).model_dump(mode="json"))
    found = run_folder.last_layers(paths)
    expected = {rank.node: rank.stage for plan in (all_of_them, without_last) for rank in plan.ranks if rank.stage}
    assert found == {(name, 0): range(stage.begin, stage.end) for name, stage in expected.items()} and len(found) == 3
    assert found[healthy.NAMES[0], 0] != range(0)
