"""A model cut into stages trains as one process does: gradients within 1e-6 after one step, weights within 1e-5 at the end, on any cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import (
    COMMON,
    LENGTH,
    LONG,
    SHORT,
    Reference,
    assert_every_sample_once_per_epoch,
    assert_the_same,
    lengths,
    references,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LAYERS = 12


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers to cut."""
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=32, intermediate=64, layers=LAYERS)


@pytest.fixture(scope="module")
def reference(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, deep: Path, data: Path) -> Reference:
    return references(forks, tmp_path_factory.mktemp("one"), deep, data)


@dataclass(frozen=True)
class Case:
    """How the model is cut; `recipe` holds what may differ without changing the training."""

    kind: str
    packing: bool
    stages: list[int]
    plan: dict[str, Any]
    recipe: dict[str, Any]


CASES = {
    "lora on 2": Case("lora", False, [5, 7], {"micro_batch": 2}, {}),
    "lora on 7/3/2, two on one node": Case(
        "lora", False, [7, 3, 2], {"micro_batch": 1, "nodes": ["a", "b", "b"]}, {"train__fused_loss": True}
    ),
    "lora packed on 4, checkpointed": Case("lora", True, [2, 5, 1, 4], {"micro_batch": 2}, {"train__gradient_checkpointing": True}),
    "qlora on 3 in another order": Case("qlora", False, [2, 7, 3], {"micro_batch": 3, "stage_order": [2, 0, 1]}, {}),
    "qlora packed on 2": Case("qlora", True, [9, 3], {"micro_batch": 4}, {"train__fused_loss": True}),
    "full on 3": Case("full", False, [4, 4, 4], {"micro_batch": 3}, {}),
}
QUICK: dict[int, tuple[str, ...]] = {SHORT: ("qlora on 3 in another order",), LONG: ()}


def shares(case: Case) -> list[int]:
    """The plan gives all rows to the first stage."""
    first = case.plan.get("stage_order", [0])[0]
    return [12 if rank == first else 0 for rank in range(len(case.stages))]


@pytest.mark.parametrize(("name", "steps"), lengths(CASES, QUICK))
def test_the_training_is_that_of_one_process(
    name: str, steps: int, forks: harness.Forks, reference: Reference, tmp_path: Path, deep: Path, data: Path
) -> None:
    case, ranks = CASES[name], len(CASES[name].stages)
    recipe = COMMON | LENGTH[steps] | {"method__kind": case.kind, "data__packing": case.packing} | case.recipe
    run = harness.make_run(tmp_path / "run", deep, data, **recipe)
    forks.train(run, 1, shares(case), stages=case.stages, timeout_s=150, **case.plan)
    assert_the_same(run, reference(case.kind, case.packing, steps), {1: (1, ranks)}, steps)
    assert_every_sample_once_per_epoch(run, ranks, steps)
    shutil.rmtree(run / "checkpoints")


@pytest.mark.timeout(400)
@pytest.mark.thorough
@pytest.mark.parametrize("steps", [SHORT, LONG])
def test_a_run_goes_on_with_another_cut_and_another_strategy(
    steps: int, forks: harness.Forks, reference: Reference, tmp_path: Path, deep: Path, data: Path
) -> None:  # fmt: skip
    """7/3/2, in the long form ddp, 5/7 and zero2, and a pipeline of one rank, which is one process."""
    one = reference("lora", False, steps)
    run = harness.make_run(tmp_path / "run", deep, data, **COMMON | LENGTH[steps] | {"method__kind": "lora", "data__packing": False})
    first: tuple[list[int], dict[str, Any]] = ([12, 0, 0], {"stages": [7, 3, 2], "micro_batch": 2})
    between: list[tuple[list[int], dict[str, Any]]] = [
        ([7, 5], {}), ([0, 12], {"stages": [5, 7], "stage_order": [1, 0], "micro_batch": 3}), ([6, 4, 2], {"strategy": "zero2"}),
    ]  # fmt: skip
    attempts = [first, *(between if steps == LONG else []), ([12], {"strategy": "pipeline"})]
    each = steps // len(attempts)
    for attempt, (rows, plan) in enumerate(attempts, start=1):
        forks.train(run, attempt, rows, resume_step=each * (attempt - 1), timeout_s=150, **plan)
    begins = {attempt: (each * (attempt - 1) + 1, len(rows)) for attempt, (rows, _) in enumerate(attempts, start=1)}
    assert_the_same(run, one, begins, steps)
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("fault", [pytest.param("dropped", marks=pytest.mark.thorough), "twice"])
def test_a_wrong_gradient_is_seen(fault: str, forks: harness.Forks, reference: Reference, tmp_path: Path, deep: Path, data: Path) -> None:
    """The comparison above is one that can fail: a micro-batch without its gradient, and one with twice of it."""
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "lora", "data__packing": False, "train__steps": 2}
    run = harness.make_run(tmp_path / "run", deep, data, **recipe)
    codes, output = forks.run(
        run, 1, [12, 0], stages=[5, 7], micro_batch=2, entry=f"tests.worker.strategies.pipeline.test_exactness:{fault}"
    )
    assert codes == [0, 0], output
    one = reference("lora", False, SHORT)
    assert harness.losses(run, 1)[1] == pytest.approx(harness.losses(one, 1)[1], rel=1e-6), "the forward passes are right"
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) > 1e-3
    assert harness.losses(run, 1)[2] != pytest.approx(harness.losses(one, 1)[2], rel=1e-6)


def dropped() -> int:
    """A worker whose stages get no gradient for their second micro-batch."""
    return _with_gradients(lambda index, gradient: gradient * (index != 1))


def twice() -> int:
    """A worker whose stages get twice the gradient of their second micro-batch."""
    return _with_gradients(lambda index, gradient: gradient * (2 if index == 1 else 1))


def _with_gradients(change: Callable[[int, Any], Any]) -> int:
    from homelab.worker.strategies.pipeline import passes
    from homelab.worker.training.train import main

    taken = passes.PipelinePasses._taken

    def changed(self: Any, inbox: Any, work: Any) -> Any:
        tensor = taken(self, inbox, work)
        if inbox is None or self.stage.is_last:  # activations
            return tensor
        inbox.counted = getattr(inbox, "counted", -1) + 1
        return change(inbox.counted, tensor) if self.stage.is_first else tensor

    passes.PipelinePasses._taken = changed
    return main()
