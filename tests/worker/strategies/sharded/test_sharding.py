"""Shards keep the law beyond one attempt: a run goes on with another strategy, after a death, in 16 bits, and an inexact sum is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

RECIPE: dict[str, Any] = {
    "train__steps": 12, "train__epochs": None, "train__warmup_steps": 0, "checkpoint__every_steps": 1, "data__eval_fraction": 0.1,
    "train__seed": 2, "parallel__micro_batch": 1,
}  # fmt: skip
TOLERANCE = 1e-5


def one_process(forks: harness.Forks, folder: Path, model: Path, data: Path, **changes: Any) -> Path:
    """The same training by one process."""
    run = harness.make_run(folder, model, data, **RECIPE | changes)
    forks.train(run, 1, [12], micro_batch=5)
    return run


@pytest.mark.parametrize(
    "attempts",
    [
        [([7, 5], "zero2"), ([4, 8], "zero3"), ([12], "ddp")],
        pytest.param(
            [([6, 4, 2], "zero2"), ([7, 5], "zero2"), ([4, 8], "ddp"), ([5, 4, 3], "zero3"), ([12], "ddp")], marks=pytest.mark.thorough
        ),
    ],
    ids=["three", "five"],
)
def test_a_run_goes_on_with_another_strategy(
    attempts: list[tuple[list[int], str]], forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    """Each from the checkpoint of the one before."""
    steps = len(attempts) + 1
    one = one_process(forks, tmp_path / "one", model, data, train__steps=steps)
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE | {"train__steps": steps})
    curve: dict[int, float] = {}
    taken: dict[int, list[int]] = {}
    for attempt, (shares, strategy) in enumerate(attempts, start=1):
        forks.train(run, attempt, shares, strategy=strategy, resume_step=attempt - 1)
        curve |= harness.losses(run, attempt)
        taken |= harness.samples(run, attempt, len(shares))
    assert curve == pytest.approx(harness.losses(one, 1), rel=TOLERANCE)
    assert taken == harness.samples(one, 1, 1), "every sample once"
    assert harness.relative_error(harness.weights(run, steps), harness.weights(one, steps)) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_dead_rank_costs_no_weight(strategy: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """kill -9 of a rank on the second node: the first node's checkpoint is whole, and another strategy goes on from it."""
    one = one_process(forks, tmp_path / "one", model, data)
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE)
    forks.killed(run, 1, [6, 4, 2], strategy=strategy, rank=2, step=4)
    from homelab.worker.checkpoints import checkpoint_folder

    newest = max(checkpoint_folder.complete_steps(run / "checkpoints"))
    assert newest >= 3
    forks.train(run, 2, [7, 5], strategy=strategy, resume_step=newest)
    assert harness.relative_error(harness.weights(run, 12), harness.weights(one, 12)) <= TOLERANCE


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.thorough), "lora"])
def test_sixteen_bits_are_those_of_ddp(kind: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """zero2 gathers linear layers in bf16, as autocast makes them of fp32 weights: the first losses are the same numbers."""
    runs = {}
    for strategy in ("ddp", "zero2"):
        runs[strategy] = harness.make_run(
            tmp_path / strategy, model, data, **RECIPE | {"method__kind": kind, "train__precision": "bf16", "train__steps": 3}
        )
        forks.train(runs[strategy], 1, [6, 4, 2], strategy=strategy, precision="bf16")
    first, second = (harness.losses(run, 1) for run in runs.values())
    assert second[1] == first[1]
    assert second == pytest.approx(first, rel=1e-4)
    sent = {name: harness.lines(run, 1, 0, "metrics.jsonl", "train")[-1]["sent_bytes"] for name, run in runs.items()}
    assert sent["zero2"] < 1.9 * sent["ddp"], "a gather in 16 bits and a scatter in 32, an all-reduce being both in 32"


@pytest.mark.parametrize(
    ("kind", "file"), [("full", "model.safetensors"), pytest.param("lora", "adapter_model.safetensors", marks=pytest.mark.thorough)]
)
def test_final_holds_whole_weights(kind: str, file: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    from safetensors.torch import load_file

    finals = {}
    for strategy in ("ddp", "zero2", "zero3"):
        run = harness.make_run(tmp_path / strategy, model, data, **RECIPE | {"method__kind": kind, "train__steps": 2})
        forks.train(run, 1, [7, 5], strategy=strategy)
        finals[strategy] = load_file(str(run / "final" / file))
        assert '"FSDP' not in (run / "final" / "README.md").read_text()
        if kind == "full":
            assert '"LlamaForCausalLM"' in (run / "final" / "config.json").read_text()
        shutil.rmtree(run / "checkpoints")
    for strategy in ("zero2", "zero3"):
        assert harness.relative_error(finals[strategy], finals["ddp"]) <= TOLERANCE, strategy


def test_a_wrong_sum_ends_the_run_before_its_first_step(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE)
    codes, output = forks.run(run, 1, [7, 5], strategy="zero2", entry="tests.worker.strategies.sharded.test_sharding:averaging")
    assert codes == [1, 1] and "Traceback" not in output, output
    error = harness.error_of(run, 1)
    assert (
        error["message"]
        == "a sum of known numbers over the ranks is wrong on rank 0 (here), rank 1 (here), so gradients would be wrong, too"
    )
    assert 'strategy = "ddp"' in error["hint"]
    assert not harness.losses(run, 1)


def averaging() -> int:
    """A worker whose sums over the ranks are averages."""
    from homelab.worker.strategies.sharded import exchange
    from homelab.worker.training.train import main

    right = exchange.sum_parts

    def mean_parts(own_part: Any, whole: Any, group: Any, *, async_op: bool = False) -> Any:
        work = right(own_part, whole, group, async_op=async_op)
        own_part.div_(group.size())
        return work

    exchange.sum_parts = mean_parts
    return main()
