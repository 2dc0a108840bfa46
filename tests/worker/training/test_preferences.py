"""The law for pairs of answers: whoever computes which pair, the training is that of one process with the same global batches."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import AFTER_ALL, COMMON, LENGTH, LONG, SHORT, assert_every_sample_once_per_epoch, assert_the_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

KINDS = ("dpo", "ipo", "simpo", "orpo", "kto", "reward")
# The two answers of a pair end with one token, and their hidden states nearly cancel: what is left of them has the rounding of the whole.
WORSE_OF_SCORES = 4.0
# Gradients begin above it for each objective: all are clipped.
CLIPPED_AT = 0.005


def pairs(count: int, most: int = 14) -> list[dict[str, str]]:
    """Answers of different length: the better one is long in some pairs and short in others."""
    chance = random.Random(7)
    words = ["red", "blue", "green", "ball", "tree", "house", "river", "stone", "cloud", "sun", "moon", "star"]

    def said(words_at_most: int) -> str:
        return " ".join(chance.choice(words) for _ in range(chance.randint(1, words_at_most)))

    return [{"prompt": f"Say {said(6)}:\n", "chosen": said(most), "rejected": said(most)} for _ in range(count)]


def labelled(count: int, most: int = 14) -> list[dict[str, Any]]:
    """Answers of which a third is bad."""
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": place % 3 != 1} for place, pair in enumerate(pairs(count, most))
    ]


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The rows of an objective."""
    folder = tmp_path_factory.mktemp("rows")
    files = [harness.write_jsonl(folder / f"{rows.__name__}.jsonl", rows(44)) for rows in (pairs, labelled)]
    return lambda kind: files[kind == "kto"]


def recipe(kind: str, **changes: Any) -> dict[str, Any]:
    return COMMON | LENGTH[SHORT] | {"objective__kind": kind, "method__kind": "lora", "train__max_grad_norm": CLIPPED_AT} | changes


@pytest.fixture(scope="module")
def one(
    forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, model: Path, preferences: Callable[[str], Path]
) -> Callable[..., Path]:
    """The run of one process, by objective and method."""
    root = tmp_path_factory.mktemp("one")

    def trained(kind: str, method: str = "lora") -> Path:
        run = root / f"{kind} {method}"
        if not run.exists():
            harness.make_run(run, model, preferences(kind), **recipe(kind, method__kind=method))
            forks.train(run, 1, [12], micro_batch=5)
        return run

    return trained


FROM_HOSTS = [{"layers": layers, "group": 2, "places": 2, "host": "memory"} for layers in (2, 1)]
STREAMED = tuple(f"{kind} with layers from the hosts of 2" for kind in KINDS)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    **{f"{kind} on 3": (kind, "lora", {"shares": [6, 4, 2], "micro_batch": [1, 2, 3]}, {}) for kind in KINDS},
    **{name: (name.split()[0], "lora", {"shares": [8, 4], "micro_batch": [2, 3], "streaming": FROM_HOSTS}, {}) for name in STREAMED},
    "dpo by zero2 on 3, one idle": ("dpo", "lora", {"shares": [8, 4, 0], "micro_batch": [3, 1, 2], "strategy": "zero2"}, {}),
    "dpo of all weights on 2, fused loss": ("dpo", "full", {"shares": [7, 5], "micro_batch": [2, 3]}, {"train__fused_loss": True}),
    "orpo on 2, fused loss, one idle": ("orpo", "lora", {"shares": [12, 0], "micro_batch": [5, 1]}, {"train__fused_loss": True}),
    "simpo of all weights by zero2 on 2, checkpointed": (
        "simpo", "full", {"shares": [3, 9], "micro_batch": [1, 4], "strategy": "zero2"}, {"train__gradient_checkpointing": True},
    ),
    "dpo by zero3 on 3": ("dpo", "lora", {"shares": [6, 4, 2], "micro_batch": [2, 1, 2], "strategy": "zero3"}, {}),
    "ipo of all weights by fsdp on 2, checkpointed, fused loss": (
        "ipo", "full", {"shares": [8, 4], "micro_batch": [2, 1], "strategy": "fsdp"}, {"train__gradient_checkpointing": True, "train__fused_loss": True},
    ),
    "orpo by hsdp on 2 and 2": ("orpo", "lora", {"shares": [5, 4, 2, 1], "micro_batch": [2, 1, 2, 1], "strategy": "hsdp", "nodes": ["a", "a", "b", "b"]}, {}),
    "reward of all weights by fsdp on 2": ("reward", "full", {"shares": [3, 9], "micro_batch": [1, 4], "strategy": "fsdp"}, {"train__gradient_checkpointing": True}),
    "reward by zero2 on 3, one idle": ("reward", "lora", {"shares": [8, 4, 0], "micro_batch": [3, 1, 2], "strategy": "zero2"}, {}),
    "kto by zero2 on 3, one idle": ("kto", "lora", {"shares": [8, 4, 0], "micro_batch": [3, 1, 2], "strategy": "zero2"}, {"train__fused_loss": True}),
    "kto of all weights by fsdp on 2": ("kto", "full", {"shares": [3, 9], "micro_batch": [1, 4], "strategy": "fsdp"}, {"train__gradient_checkpointing": True}),
}  # fmt: skip


# What differs in them is tried by others, each alone.
RARE = (
    *STREAMED,
    "orpo in 2 stages, all weights", "kto in 3 stages", "simpo on 3", "ipo on 3", "ipo of all weights by fsdp on 2, checkpointed, fused loss", "dpo by zero3 on 3",
    "reward of all weights by fsdp on 2", "reward by zero2 on 3, one idle", "kto by zero2 on 3, one idle", "kto of all weights by fsdp on 2", "reward in 3 stages",
    "orpo by hsdp on 2 and 2", "dpo of all weights on 2, fused loss", "orpo on 2, fused loss, one idle", "simpo of all weights by zero2 on 2, checkpointed",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "pipeline"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_thirty_steps_too(
    kind: str, strategy: str, forks: harness.Forks, tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    changes = recipe(kind) | LENGTH[LONG]
    alone, run = (harness.make_run(tmp_path / who, model, preferences(kind), **changes) for who in ("one", "run"))
    forks.train(alone, 1, [12], micro_batch=5)
    plan: dict[str, Any] = {"shares": [6, 4, 2], "micro_batch": [1, 2, 3], "strategy": strategy}
    if strategy == "pipeline":
        plan = {"shares": [0, 12], "stages": [1, 1], "stage_order": [1, 0], "micro_batch": 3}
    forks.train(run, 1, **plan)
    assert_the_same(run, alone, {1: (1, len(plan["shares"]))}, LONG, CLIPPED_AT, WORSE_OF_SCORES if kind == "reward" else 1.0)


STAGES: dict[str, tuple[str, str, list[int], dict[str, Any], dict[str, Any]]] = {
    "dpo in 3 stages": ("dpo", "lora", [2, 7, 3], {"micro_batch": 3, "stage_order": [2, 0, 1]}, {"train__fused_loss": True}),
    "reward in 3 stages": ("reward", "lora", [4, 5, 3], {"micro_batch": 2, "stage_order": [1, 0, 2]}, {}),
    "kto in 3 stages": ("kto", "lora", [4, 5, 3], {"micro_batch": 2, "stage_order": [2, 0, 1]}, {"train__fused_loss": True}),
    "orpo in 2 stages, all weights": ("orpo", "full", [5, 7], {"micro_batch": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) if name in RARE else name for name in STAGES])
def test_a_model_in_stages_learns_the_same(name: str, forks: harness.Forks, tmp_path: Path, preferences: Callable[[str], Path]) -> None:
    kind, method, stages, plan, changes = STAGES[name]
    deep = harness.tiny_llama(tmp_path / "tiny-llama", hidden=32, intermediate=64, layers=12)
    alone, run = (
        harness.make_run(tmp_path / who, deep, preferences(kind), **recipe(kind, method__kind=method, **changes)) for who in ("one", "run")
    )
    forks.train(alone, 1, [12], micro_batch=5)
    first = plan.get("stage_order", [0])[0]
    forks.train(run, 1, [12 if rank == first else 0 for rank in range(len(stages))], stages=stages, **plan)
    assert_the_same(run, alone, {1: (1, len(stages))}, SHORT, CLIPPED_AT / 10, WORSE_OF_SCORES if kind == "reward" else 1.0)
    assert_every_sample_once_per_epoch(run, len(stages), SHORT)
    if method != "full":
        assert harness.adapter_settings(run) == harness.adapter_settings(alone), "of all layers"
    ends = [harness.lines(where, 1, 0, "metrics.jsonl", "eval")[-1] for where in (run, alone)]
    assert ends[0]["eval_accuracy"] == ends[1]["eval_accuracy"] and ends[0]["eval_margin"] == pytest.approx(
        ends[1]["eval_margin"], rel=1e-4
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) if name in RARE else name for name in CASES])
def test_the_training_is_that_of_one_process(
    name: str, forks: harness.Forks, one: Callable[..., Path], tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    kind, method, plan, changes = CASES[name]
    run = harness.make_run(tmp_path / "run", model, preferences(kind), **recipe(kind, method__kind=method, **changes))
    forks.train(run, 1, **plan)
    ranks = len(plan["shares"])
    assert_the_same(run, one(kind, method), {1: (1, ranks)}, SHORT, CLIPPED_AT, WORSE_OF_SCORES if kind == "reward" else 1.0)
    assert_every_sample_once_per_epoch(run, ranks, SHORT)
    for which in ("train", "eval"):
        prefix = "eval_" if which == "eval" else ""
        mine, alone = (harness.lines(where, 1, 0, "metrics.jsonl", which) for where in (run, one(kind, method)))
        for key in (f"{prefix}margin", f"{prefix}accuracy", *([f"{prefix}kl"] if kind == "kto" else [])):
            # Before the first step, a model differs from its base by rounding alone: nobody knows which answer it finds better.
            first = 1 if key.endswith("accuracy") else 0
            assert [line[key] for line in mine][first:] == pytest.approx([line[key] for line in alone][first:], rel=1e-4, abs=1e-6), key
        assert all(line[f"{prefix}perplexity"] is None for line in mine)
    card = (run / "final" / "README.md").read_text()
    rows = "labelled answers" if kind == "kto" else "pairs of answers"
    assert f"{kind} ({rows}{'' if kind == 'reward' else ', beta 0.1'})" in card and "loss of a row" in card and "| perplexity" not in card


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_objective_goes_on_elsewhere(
    kind: str,
    strategy: str,
    forks: harness.Forks,
    one: Callable[..., Path],
    tmp_path: Path,
    model: Path,
    preferences: Callable[[str], Path],
) -> None:
    """From a checkpoint of one process, as after the loss of a machine."""
    run, whole = harness.make_run(tmp_path / "run", model, preferences(kind), **recipe(kind)), harness.losses(one(kind), 1)
    shutil.copytree(one(kind) / "checkpoints/step-00000002", run / "checkpoints/step-00000002")
    forks.train(run, 2, [6, 4, 2], micro_batch=[1, 2, 3], strategy=strategy, resume_step=2)
    assert harness.losses(run, 2) == pytest.approx({step: whole[step] for step in range(3, SHORT + 1)}, rel=AFTER_ALL)
    end, expected = (harness.weights(which, SHORT) for which in (run, one(kind)))
    assert harness.relative_error(end, expected) <= AFTER_ALL * (WORSE_OF_SCORES if kind == "reward" else 1.0)


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.thorough), "lora"])
def test_a_run_goes_on_elsewhere_with_the_reference_it_began_with(
    method: str, forks: harness.Forks, one: Callable[..., Path], tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    """Also of all weights, whose base is not there any more once they are trained. Without the numbers, adapters can be left out, and nothing else."""
    run, whole = (
        harness.make_run(tmp_path / "run", model, preferences("dpo"), **recipe("dpo", method__kind=method)),
        harness.losses(one("dpo", method), 1),
    )
    shutil.copytree(one("dpo", method) / "checkpoints/step-00000002", run / "checkpoints/step-00000002")
    kept = (one("dpo", method) / "reference.bin").read_bytes()
    (run / "reference.bin").write_bytes(kept)
    output = forks.train(run, 2, [4, 4, 4], micro_batch=[1, 2, 4], resume_step=2)
    assert (run / "reference.bin").read_bytes() == kept and "has read" not in output, "nothing is computed again"
    assert harness.losses(run, 2) == pytest.approx({step: whole[step] for step in range(3, SHORT + 1)}, rel=AFTER_ALL)
    (run / "reference.bin").unlink()
    codes, output = forks.run(run, 3, [6, 6], micro_batch=3, resume_step=2)
    if method == "full":
        assert (
            codes == [1, 1]
            and "the model that the run began with was trained already" in output
            and "reference.bin in the folder of the run, on here" in output
        )
    else:
        assert codes == [0, 0] and "has read" in output
        assert harness.losses(run, 3) == pytest.approx({step: whole[step] for step in range(3, SHORT + 1)}, rel=AFTER_ALL)


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.thorough), "lora"])
def test_others_load_a_model_that_scores(
    method: str, forks: harness.Forks, tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    """As transformers and PEFT read it, it gives the held-out pairs the lead that the run has measured."""
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = harness.make_run(tmp_path / "run", model, preferences("reward"), **recipe("reward", method__kind=method, data__template="none"))
    forks.train(run, 1, [7, 5], micro_batch=2)
    loader = AutoModelForSequenceClassification if method == "full" else AutoPeftModelForSequenceClassification
    loaded = loader.from_pretrained(str(run / "final"), num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    last = harness.lines(run, 1, 0, "metrics.jsonl", "eval")[-1]
    taken = {row for ids in harness.samples(run, 1, 2).values() for row in ids}
    held_out = [row for place, row in enumerate(pairs(44)) if place not in taken]
    leads = []
    for row in held_out:
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected")]
        with torch.no_grad():
            better, other = (float(loaded(**tokenizer(text, return_tensors="pt")).logits) for text in texts)
        leads.append(better - other)
    assert len(leads) == 4 and sum(leads) / 4 == pytest.approx(last["eval_margin"], rel=1e-3)


def mean_of_means() -> int:
    """The worker as others do it: each rank divides by its own pairs, and the ranks' gradients are averaged."""
    from homelab.worker.data.batches import StepBatches
    from homelab.worker.training import figures_of_step, train

    take = StepBatches.__getitem__

    def own(self: StepBatches, step: int) -> Any:
        item = take(self, step)
        return dataclasses.replace(item, loss_tokens=self.balance_ranks * item.rows)

    StepBatches.balance_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    StepBatches.__getitem__ = own
    figures_of_step.refuse_other_batch = lambda *_, **__: None
    return train.main()


def test_a_mean_of_means_is_seen(
    forks: harness.Forks, one: Callable[..., Path], tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    """The control of the tests above."""
    run = harness.make_run(tmp_path / "run", model, preferences("dpo"), **recipe("dpo"))
    codes, output = forks.run(run, 1, [9, 2, 1], micro_batch=3, entry=f"{__name__}:mean_of_means")
    assert codes == [0, 0, 0], output
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one("dpo"))) > 0.1


def own_baseline() -> int:
    """The worker as others do it: each rank takes its own answers for the baseline."""
    from homelab.worker.training import baseline, train

    of_all = baseline.measured

    def of_own(unmatched: Any, _rows: int, strategy: Any, model: Any, form: Any, _gather: Any, after_pass: Any) -> float:
        return of_all(unmatched, sum(map(form.counted, unmatched)), strategy, model, form, lambda values: [values], after_pass)

    baseline.measured = of_own
    return train.main()


def test_a_baseline_of_one_rank_is_seen(
    forks: harness.Forks, one: Callable[..., Path], tmp_path: Path, model: Path, preferences: Callable[[str], Path]
) -> None:
    """The control of judged answers. In the first step no weight has moved, and every baseline is 0."""
    run = harness.make_run(tmp_path / "run", model, preferences("kto"), **recipe("kto"))
    codes, output = forks.run(run, 1, [9, 2, 1], micro_batch=3, entry=f"{__name__}:own_baseline")
    assert codes == [0, 0, 0], output
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one("kto"))) < 1e-5
    baselines = [line["kl"] for line in harness.lines(one("kto"), 1, 0, "metrics.jsonl", "train")]
    assert baselines[0] == 0 and min(baselines[1:]) > 0.1
    whole = harness.losses(one("kto"), 1)
    assert harness.losses(run, 1)[SHORT] != pytest.approx(whole[SHORT], rel=1e-4)
