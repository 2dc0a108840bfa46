"""fp16 in every strategy: the steps that overflow are those of one process, all ranks skip them, and the loss scale is one number, in checkpoints too.

The scale begins so high that the first steps overflow, and grows after two good steps, so that later ones do again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import method

pytestmark = pytest.mark.timeout(300)

STEPS = 8
RECIPE: dict[str, Any] = {
    "train__steps": STEPS, "train__epochs": None, "train__warmup_steps": 0, "checkpoint__every_steps": 1, "data__eval_fraction": 0.1,
    "train__seed": 2, "parallel__micro_batch": 1, "train__precision": "fp16",
}  # fmt: skip
ENTRY = "tests.worker.training.test_fp16:overflowing"
APART, WEIGHTS_APART = 1e-5, 5e-4  # measured at worst: 4e-6 (losses), 1.4e-4 (weights: Adam enlarges the last digits of small gradients)

Reference = Callable[[str], Path]


def overflowing() -> int:
    """A worker whose loss scale begins high, and grows soon."""
    from homelab.worker.training import loss_scale
    from homelab.worker.training.train import main

    loss_scale.FIRST, loss_scale._GROWS_AFTER = 2.0**21, 2
    return main()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers to cut."""
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=32, intermediate=64, layers=6)


@pytest.fixture(scope="module")
def reference(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, deep: Path, data: Path) -> Reference:
    """The run of one process by its method; trained when it is first asked for."""
    root, trained = tmp_path_factory.mktemp("one"), {}

    def train(kind: str) -> Path:
        if kind not in trained:
            trained[kind] = harness.make_run(root / kind, deep, data, **RECIPE | method(kind))
            attempt(forks, trained[kind], 1, [12], micro_batch=3)
        return trained[kind]

    return train


@dataclass(frozen=True)
class Case:
    """How the work is divided; `recipe` holds what may differ without changing the training."""

    kind: str
    rows: list[int]
    plan: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)


CASES = {
    "lora on 2 stages": Case("lora", [12, 0], {"stages": [2, 4], "micro_batch": 3}),
    "lora on 3 stages in another order": Case("lora", [0, 12, 0], {"stages": [2, 1, 3], "stage_order": [1, 2, 0], "micro_batch": 3}),
    "full on 3 stages": Case("full", [12, 0, 0], {"stages": [1, 2, 3], "micro_batch": 3}),
    "qlora on 2 stages": Case("qlora", [12, 0], {"stages": [4, 2], "micro_batch": 3}),
    "lora 8bit on 2 stages": Case("lora 8bit", [12, 0], {"stages": [3, 3], "micro_batch": 3}),
    "lora on 3 stages, other micro-batches": Case("lora", [12, 0, 0], {"stages": [2, 1, 3], "micro_batch": 2}, {"train__gradient_checkpointing": True}),
    "full in other micro-batches": Case("full", [12], {"micro_batch": 5}),
    "full by ddp on 3": Case("full", [6, 4, 2], {"micro_batch": [2, 1, 2]}),
    "lora by ddp on 2, fused loss": Case("lora", [7, 5], {"micro_batch": [2, 3]}, {"train__fused_loss": True}),
    "lora by zero2 on 2": Case("lora", [7, 5], {"micro_batch": [2, 3], "strategy": "zero2"}),
    "full by zero2 on 3": Case("full", [6, 4, 2], {"micro_batch": [2, 1, 2], "strategy": "zero2"}),
    "qlora by zero2 on 3, one idle": Case("qlora", [8, 4, 0], {"micro_batch": [3, 1, 2], "strategy": "zero2"}),
    "full by zero3 on 3": Case("full", [6, 4, 2], {"micro_batch": [2, 1, 2], "strategy": "zero3"}),
    "lora by fsdp on 2": Case("lora", [7, 5], {"micro_batch": [2, 3], "strategy": "fsdp"}),
    "full by hsdp on 2 and 2": Case("full", [5, 4, 2, 1], {"micro_batch": [2, 1, 2, 1], "strategy": "hsdp", "nodes": ["a", "a", "b", "b"]}),
}  # fmt: skip
QUICK = ("lora on 2 stages",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES])
def test_the_training_is_that_of_one_process(
    name: str, forks: harness.Forks, reference: Reference, tmp_path: Path, deep: Path, data: Path
) -> None:
    case, one = CASES[name], reference(CASES[name].kind)
    run = harness.make_run(tmp_path / "run", deep, data, **RECIPE | method(case.kind) | case.recipe)
    attempt(forks, run, 1, case.rows, **case.plan)
    assert_the_same(run, one, {1: (1, len(case.rows))})
    if "stages" in case.plan and case.plan["micro_batch"] == 3:
        assert harness.losses(run, 1) == harness.losses(one, 1), "to the last bit: a stage adds up as one process does"
        assert harness.whole_error(harness.weights(run, STEPS), harness.weights(one, STEPS)) == 0
    if "nodes" in case.plan:  # every node's own checkpoint
        other = harness.folder_of(run, "b", case.plan["nodes"])
        assert scales(other) == scales(run)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_goes_on_with_its_scale_after_a_death_and_in_other_strategies(
    forks: harness.Forks, reference: Reference, tmp_path: Path, deep: Path, data: Path
) -> None:  # fmt: skip
    """kill -9 of a stage in the middle of it, then ddp, zero2 and a pipeline again."""
    run = harness.make_run(tmp_path / "run", deep, data, **RECIPE, method__kind="lora")
    forks.killed(run, 1, [12, 0, 0], rank=1, step=3, entry=ENTRY, precision="fp16", stages=[2, 1, 3], micro_batch=3)
    from homelab.worker.checkpoints import checkpoint_folder

    newest = max(checkpoint_folder.complete_steps(run / "checkpoints"))
    assert 2 <= newest <= 5
    attempt(forks, run, 2, [7, 5], resume_step=newest - 1)
    attempt(forks, run, 3, [7, 5], resume_step=6, strategy="zero2")
    attempt(forks, run, 4, [0, 12], resume_step=7, stages=[3, 3], stage_order=[1, 0], micro_batch=3)
    assert_the_same(run, reference("lora"), {1: (1, 3), 2: (newest, 2), 3: (7, 2), 4: (8, 2)})


def test_a_processor_without_instructions_for_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from homelab.worker.model import build

    for has, words in ((False, "up to 80 times faster"), (True, "")):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda has=has: has)
        said = build._slowness(harness.task_of(Path(), plan={"precision": "fp16"}))
        assert (words in said) if words else not said
    assert not build._slowness(harness.task_of(Path(), plan={"precision": "fp32"}))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_gradient_that_no_scale_mends_ends_the_run(forks: harness.Forks, tmp_path: Path, deep: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", deep, data, **RECIPE, method__kind="lora")
    codes, output = forks.run(
        run, 1, [12, 0], precision="fp16", stages=[2, 4], micro_batch=3, entry="tests.worker.training.test_fp16:never_finite"
    )
    assert codes == [1, 1] and "Traceback" not in output, output
    assert harness.error_of(run, 1)["message"].startswith("the gradient is not a number in step 3 on rank 0 (here)")
    assert [line["grad_norm"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "train")] == [None, None]


def never_finite() -> int:
    """A worker whose last stage has an infinite gradient in every step."""
    from homelab.worker.training import loss_scale
    from homelab.worker.training.train import main

    loss_scale.FIRST = 2.0
    loss_scale.LossScale.scale = lambda self, loss: loss * float("inf")
    return main()


def attempt(forks: harness.Forks, run: Path, number: int, rows: list[int], **plan: Any) -> None:
    codes, output = forks.run(run, number, rows, entry=ENTRY, precision="fp16", timeout_s=150, **plan)
    assert not any(codes), f"{codes}\n{output}"


def scales(run: Path) -> dict[int, tuple[float, int]]:
    """Step -> the loss scale after it and the good steps since it changed, as the checkpoints have them."""
    import torch

    states = {int(path.parent.name[5:]): torch.load(path, weights_only=True) for path in (run / "checkpoints").glob("step-*/scaler.pt")}
    return {step: (state["scale"], state["_growth_tracker"]) for step, state in sorted(states.items())}


def assert_the_same(run: Path, one: Path, attempts: dict[int, tuple[int, int]]) -> None:
    """`attempts` names the first step that counts of each attempt, and its ranks."""
    expected = {line["step"]: line for line in harness.lines(one, 1, 0, "metrics.jsonl", "train")}
    skipped = [step for step, line in expected.items() if line["grad_norm"] is None]
    assert skipped and skipped != list(range(1, len(skipped) + 1)) and len(skipped) < STEPS, "first ones, and one after a good one"
    found: dict[int, dict[str, Any]] = {}
    for number, (first, ranks) in attempts.items():
        lines = [harness.lines(run, number, rank, "metrics.jsonl", "train") for rank in range(ranks)]
        for key in ("loss", "grad_norm", "learning_rate"):
            most = min(map(len, lines))  # of an attempt that was killed
            assert all([line[key] for line in rank[:most]] == [line[key] for line in lines[0][:most]] for rank in lines), (
                f"{key} on all ranks"
            )
        found |= {line["step"]: line for line in lines[0] if line["step"] >= first}
    assert list(found) == list(range(1, STEPS + 1))
    assert [step for step, line in found.items() if line["grad_norm"] is None] == skipped, "the same steps are skipped"
    assert scales(run) == scales(one) and list(scales(one)) == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate"):
        assert [line[key] for line in found.values()] == pytest.approx([line[key] for line in expected.values()], rel=APART), key
    norms = [(line["grad_norm"], expected[step]["grad_norm"]) for step, line in found.items() if step not in skipped]
    assert [norm for norm, _ in norms] == pytest.approx([norm for _, norm in norms], rel=1e-3)
    assert harness.whole_error(harness.weights(run, STEPS), harness.weights(one, STEPS)) <= WEIGHTS_APART
    held_out = [harness.lines(which, last, 0, "metrics.jsonl", "eval")[-1]["eval_loss"] for which, last in ((run, max(attempts)), (one, 1))]
    assert held_out[0] == pytest.approx(held_out[1], rel=APART)
