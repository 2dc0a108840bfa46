"""A rank some of whose layers come from the host trains as one that holds them all: to the last bit where no gradients are exchanged, and after a recovery."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from homelab.worker.training import speed_profile
from tests.worker import harness
from tests.worker.training.test_exactness import COMMON, LENGTH, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LAYERS = 8


def of(layers: int, group: int = 99, places: int = 2, host: str = "memory") -> dict[str, Any]:
    return {"layers": layers, "group": group, "places": places, "host": host}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers to stream, whose matrices are large enough to come from the host."""
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=64, intermediate=128, layers=LAYERS)


@dataclass(frozen=True)
class Case:
    """A plan, which of its layers are streamed on each rank, and the recipe."""

    kind: str
    shares: list[int]
    streaming: list[dict[str, Any] | None]
    plan: dict[str, Any]
    recipe: dict[str, Any]


CASES = {
    "qlora alone, all layers, all passes at once": Case("qlora", [12], [of(8)], {"micro_batch": 2}, {"train__fused_loss": True}),
    "lora alone from the disk, pass after pass, one place": Case(
        "lora", [12], [of(5, 1, 1, "disk")], {"micro_batch": 3}, {"data__packing": True}
    ),
    "8 bits alone, two passes at a time": Case("lora", [12], [of(8, 2)], {"micro_batch": 2}, {"method__base": "8bit"}),
    "qlora, ddp 6:4:2, streamed on two of three": Case("qlora", [6, 4, 2], [of(8, 2), None, of(3)], {"micro_batch": 2}, {}),
    "lora, pipeline of 3, streamed on the first and the last": Case(
        "lora", [12, 0, 0], [of(2), None, of(3, 1, 3)], {"micro_batch": 2, "stages": [2, 2, 4]}, {"train__fused_loss": True}
    ),
    "lora with dropout alone, also on the head": Case(
        "lora", [12], [of(8, 2)], {"micro_batch": 2}, {"method__dropout": 0.2, "method__targets": ["q_proj", "down_proj", "lm_head"]}
    ),
    "lora with dropout, pipeline of 3, streamed on two": Case(
        "lora", [12, 0, 0], [of(2), None, of(3, 1, 3)], {"micro_batch": 2, "stages": [2, 2, 4]}, {"method__dropout": 0.2}
    ),
    "qlora in bf16 alone, two passes at a time": Case(
        "qlora", [12], [of(8, 2)], {"micro_batch": 2, "precision": "bf16"}, {"train__precision": "bf16", "train__fused_loss": True}
    ),
    "lora in bf16, pipeline of 3, streamed on two": Case(
        "lora",
        [12, 0, 0],
        [of(2), None, of(3, 1, 3)],
        {"micro_batch": 2, "stages": [2, 2, 4], "precision": "bf16"},
        {"train__precision": "bf16"},
    ),
    "qlora in fp16, ddp 6:6, streamed on both": Case(
        "qlora", [6, 6], [of(8, 2), of(8, 2)], {"micro_batch": 2, "precision": "fp16"}, {"train__precision": "fp16"}
    ),
    "qlora, pipeline of 3, all of the middle one": Case(
        "qlora", [12, 0, 0], [of(3), of(2, 1, 1), None], {"micro_batch": 3, "stages": [4, 2, 2]}, {}
    ),
}


def trained(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "trainable.safetensors")


QUICK = ("qlora, pipeline of 3, all of the middle one",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES])
def test_the_training_is_that_of_resident_layers(name: str, forks: harness.Forks, tmp_path: Path, deep: Path, data: Path) -> None:
    case = CASES[name]
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": case.kind, "train__gradient_checkpointing": True} | case.recipe
    if name in QUICK:  # half the cost of a step is its checkpoint
        recipe |= {"checkpoint__every_steps": SHORT}
    runs = []
    for own, streaming in (("resident", None), ("streamed", case.streaming)):
        run = harness.make_run(tmp_path / own, deep, data, **recipe)
        forks.train(run, 1, case.shares, streaming=streaming, timeout_s=150, **case.plan)
        runs.append(run)
    resident, streamed = runs
    one, other = trained(resident, SHORT), trained(streamed, SHORT)
    assert one.keys() == other.keys()
    if len(case.shares) == 1 or "stages" in case.plan:
        assert harness.losses(resident, 1) == harness.losses(streamed, 1)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    else:  # the ranks' gradients are the same, and buckets in another order add them up in another one
        assert harness.losses(resident, 1) == pytest.approx(harness.losses(streamed, 1), rel=1e-6)
        assert harness.relative_error(harness.first_gradient(streamed), harness.first_gradient(resident)) <= 1e-6
        assert harness.relative_error(other, one) <= 1e-5
    assert not list(streamed.rglob("layers*")), "the file of the layers is gone"
    for run in runs:
        shutil.rmtree(run / "checkpoints")


@pytest.mark.thorough
def test_a_streamed_run_goes_on_with_resident_layers(forks: harness.Forks, tmp_path: Path, deep: Path, data: Path) -> None:
    """Three steps with streamed layers, then a pipeline whose second stage streams, then none: the curve is that of one run without any."""
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "qlora", "train__gradient_checkpointing": True}
    one, parts = harness.make_run(tmp_path / "one", deep, data, **recipe), harness.make_run(tmp_path / "parts", deep, data, **recipe)
    forks.train(one, 1, [12], micro_batch=2)
    forks.train(parts, 1, [12], micro_batch=2, streaming=[of(8)])
    forks.train(parts, 2, [12, 0], micro_batch=2, stages=[4, 4], streaming=[None, of(2)], resume_step=2)
    forks.train(parts, 3, [12], micro_batch=2, resume_step=4)
    losses = {step: loss for attempt in (1, 2, 3) for step, loss in harness.losses(parts, attempt).items()}
    assert losses == pytest.approx(harness.losses(one, 1), rel=1e-6)
    assert harness.relative_error(trained(parts, SHORT), trained(one, SHORT)) <= 1e-5


def test_what_waited_for_the_host_is_no_speed(tmp_path: Path) -> None:
    """The next plan would take the machine for a slow one."""
    rank = {"rank": 0, "node": "here", "share": 12, "streaming": of(2)}
    task = harness.task_of(tmp_path / "runs" / "one", plan={"ranks": [rank]})
    nobody: Any = None  # whatever it asked of a trainer would be an error
    speed_profile.keep(task, nobody, nobody, None, None)
    assert not speed_profile.path_of(task).exists()
