"""Dropout in stages: each layer draws by the seed of the micro-batch and its own number, so the masks are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import AFTER_ALL, AFTER_ONE, COMMON, LONG, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LAYERS = 4
DROPS = {"method__kind": "lora", "method__dropout": 0.2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers to cut, whose own config.json has dropout in its attention."""
    folder = harness.tiny_llama(tmp_path_factory.mktemp("deep") / "model", hidden=32, intermediate=64, layers=LAYERS)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.1}))
    return folder


@dataclass(frozen=True)
class Case:
    """How the model is cut, and the dropout; `spread`: keys of the recipe that differ from those of one process."""

    stages: list[int]
    recipe: dict[str, Any]
    spread: dict[str, Any]
    micro_batch: int = 2
    order: list[int] | None = None


CASES = {
    "adapters on 2": Case([1, 3], DROPS, {}),
    "adapters on 3, checkpointed": Case([2, 1, 1], DROPS, {"train__gradient_checkpointing": True}, order=[2, 0, 1]),
    "adapters and model on 3, packed": Case([1, 1, 2], DROPS | {"method__model_dropout": True, "data__packing": True}, {}, 1),
    "model of full weights on 2, checkpointed": Case(
        [2, 2], {"method__kind": "full", "method__model_dropout": True}, {"train__gradient_checkpointing": True}, 3
    ),
}


def recipe_of(case: Case, steps: int) -> dict[str, Any]:
    return COMMON | {"train__steps": steps, "checkpoint__every_steps": 1 if steps == SHORT else steps} | case.recipe


@pytest.fixture(scope="module")
def alone(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, deep: Path, data: Path) -> Callable[[str, int], Path]:
    """The run of one process with the same passes, by case and steps."""
    root = tmp_path_factory.mktemp("alone")

    def trained(name: str, steps: int) -> Path:
        run = root / f"{name} {steps}"
        if not run.exists():
            harness.make_run(run, deep, data, **recipe_of(CASES[name], steps))
            forks.train(run, 1, [12], micro_batch=CASES[name].micro_batch)
        return run

    return trained


def in_stages(case: Case, run: Path, **plan: Any) -> dict[str, Any]:
    """The arguments of an attempt on these stages."""
    first = (case.order or [0])[0]
    rows = [12 if rank == first else 0 for rank in range(len(case.stages))]
    return {"run": run, "shares": rows, "stages": case.stages, "stage_order": case.order, "micro_batch": case.micro_batch} | plan


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(name, steps, marks=() if (name, steps) in quick else pytest.mark.thorough)
        for quick in [{("adapters and model on 3, packed", SHORT)}]
        for name in CASES
        for steps in (SHORT, LONG)
    ],
)
def test_the_masks_are_those_of_one_process(
    name: str, steps: int, forks: harness.Forks, alone: Callable[[str, int], Path], tmp_path: Path, deep: Path, data: Path
) -> None:
    case, one = CASES[name], alone(name, steps)
    run = harness.make_run(tmp_path / "run", deep, data, **recipe_of(case, steps) | case.spread)
    forks.train(attempt=1, **in_stages(case, run))

    assert harness.losses(run, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    if steps == SHORT:
        assert harness.losses(run, 1)[1] == pytest.approx(harness.losses(one, 1)[1], rel=AFTER_ONE)
        assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) < AFTER_ONE
    assert harness.relative_error(harness.weights(run, steps), harness.weights(one, steps)) < AFTER_ALL
    if name == "adapters on 3, checkpointed" and steps == SHORT:
        off = harness.make_run(tmp_path / "off", deep, data, **recipe_of(case, steps) | {"method__dropout": 0.0})
        forks.train(off, 1, [12], micro_batch=case.micro_batch)
        assert harness.relative_error(harness.first_gradient(off), harness.first_gradient(one)) > 1e-2, "there is dropout in it"


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_every_strategy_draws_them(
    strategy: str, forks: harness.Forks, alone: Callable[[str, int], Path], tmp_path: Path, deep: Path, data: Path
) -> None:
    """With one row in each pass, the passes are the same on any number of ranks."""
    name = "adapters and model on 3, packed"
    run = harness.make_run(tmp_path / "run", deep, data, **recipe_of(CASES[name], SHORT), train__gradient_checkpointing=True)
    forks.train(run, 1, [7, 5], micro_batch=1, strategy=strategy)
    one = alone(name, SHORT)
    assert harness.losses(run, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    assert harness.relative_error(harness.weights(run, SHORT), harness.weights(one, SHORT)) < AFTER_ALL


def test_layers_that_draw_one_after_the_other_are_seen(
    forks: harness.Forks, alone: Callable[[str, int], Path], tmp_path: Path, deep: Path, data: Path
) -> None:
    """The comparison above is one that can fail: every layer begins with the same numbers."""
    name = "adapters on 3, checkpointed"
    case, one = CASES[name], alone(name, SHORT)
    run = harness.make_run(tmp_path / "run", deep, data, **recipe_of(case, SHORT) | case.spread)
    codes, output = forks.run(attempt=1, **in_stages(case, run, entry=f"{__name__}:without_layers"))
    assert not any(codes), output
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) > 1e-3


def without_layers() -> int:
    """A worker whose layers begin with the seed of the micro-batch alone."""
    from homelab.worker.model import layer_seeds
    from homelab.worker.training.train import main

    begin = layer_seeds._begin_layer
    layer_seeds._begin_layer = lambda _number, *call: begin(0, *call)
    return main()


@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_killed_and_gone_on_with_another_cut(
    forks: harness.Forks, alone: Callable[[str, int], Path], tmp_path: Path, deep: Path, data: Path
) -> None:
    name = "adapters on 2"
    case, one = CASES[name], alone(name, SHORT)
    run = harness.make_run(tmp_path / "run", deep, data, **recipe_of(case, SHORT))
    forks.killed(attempt=1, rank=1, step=3, **in_stages(case, run))
    forks.train(run, 2, [12, 0, 0], stages=[2, 1, 1], micro_batch=2, resume_step=2)
    forks.train(run, 3, [12], micro_batch=2, resume_step=4)

    expected = harness.losses(one, 1)
    assert harness.losses(run, 2) == pytest.approx({step: expected[step] for step in range(3, 7)}, rel=AFTER_ALL)
    assert harness.losses(run, 3) == pytest.approx({step: expected[step] for step in (5, 6)}, rel=AFTER_ALL)
    assert harness.relative_error(harness.weights(run, SHORT), harness.weights(one, SHORT)) < AFTER_ALL


def test_a_run_of_an_older_version_goes_on_as_it_began(forks: harness.Forks, tmp_path: Path, deep: Path, data: Path) -> None:
    """Its layers draw one after the other, which stages cannot do."""
    recipe = COMMON | {"train__steps": 2, "checkpoint__every_steps": 2} | DROPS
    new, old, cut = (harness.make_run(tmp_path / name, deep, data, **recipe) for name in ("new", "old", "cut"))
    for run in (old, cut):
        described = json.loads((run / "run.json").read_text())
        del described["draws"]
        (run / "run.json").write_text(json.dumps(described))
    for run in (new, old):
        forks.train(run, 1, [12], micro_batch=2)
    codes, output = forks.run(cut, 1, [12, 0], stages=[2, 2], micro_batch=2)

    assert harness.relative_error(harness.weights(old, 2), harness.weights(new, 2)) > 1e-3
    assert codes == [2, 2] and "Traceback" not in output
    error = harness.error_of(cut, 1)
    assert error["message"].startswith("an older homelab began this run") and error["hint"].endswith("homelab recover cut --strategy ddp")
