"""The law in figures: whoever computes what, the training is that of one process with the same global batches.

In fp32: within 1e-6 after one step and within 1e-5 after the last one, for every method, packed or padded, one to five ranks, fixed shares
and measured ones, ranks of several nodes, and a run that goes on elsewhere. Six steps are one and a half epochs, thirty are seven and a
half, each with a smaller last batch; gradients are clipped in all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SHORT, LONG = 6, 30
# relative; measured at worst: 4e-7 (first gradient), 3e-7 (weights and losses after thirty steps)
AFTER_ONE, AFTER_ALL = 1e-6, 1e-5
CLIPPED_AT = 0.5  # the gradients begin at 0.9 (lora, qlora) and 3.8 (full)
# Adam's first step is the gradient over its own size. An adapter's B starts at zero, so where an element's gradient is as good as zero
# (1e-9 beside 1e-2), its first weight is the last digits of a sum. This seed has no such element in any of the six runs; 42 has one.
SEED = 2
COMMON: dict[str, Any] = {
    "train__epochs": None, "train__warmup_steps": 0, "train__max_grad_norm": CLIPPED_AT, "parallel__micro_batch": 1,
    "data__eval_fraction": 0.1, "train__seed": SEED,
}  # fmt: skip
# The first gradient stands in the checkpoint of step 1. Half the cost of a step is its checkpoint: thirty steps have few.
LENGTH: dict[int, dict[str, Any]] = {
    SHORT: {"train__steps": SHORT, "checkpoint__every_steps": 1},
    LONG: {"train__steps": LONG, "checkpoint__every_steps": 6},
}

Reference = Callable[[str, bool, int], Path]


@pytest.fixture(scope="module")
def reference(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Reference:
    return references(forks, tmp_path_factory.mktemp("one"), model, data)


def references(forks: harness.Forks, root: Path, model: Path, data: Path) -> Reference:
    """The run of one process, by method, packing and steps; trained when it is first asked for."""
    found: dict[tuple[str, bool, int], Path] = {}

    def train(kind: str, packing: bool, steps: int) -> Path:
        key = kind, packing, steps
        if key not in found:
            recipe = COMMON | LENGTH[steps] | method(kind) | {"data__packing": packing}
            found[key] = harness.make_run(root / f"{kind}{' packed' if packing else ''} {steps}", model, data, **recipe)
            forks.train(found[key], 1, [12], micro_batch=5)
        return found[key]

    return train


def method(kind: str) -> dict[str, Any]:
    """A recipe's kind of method; "lora 8bit" is lora with that base."""
    name, _, base = kind.partition(" ")
    return {"method__kind": name, "method__base": base or "auto"}


@dataclass(frozen=True)
class Case:
    """How the work is spread; `recipe` holds what may differ without changing the training."""

    kind: str
    packing: bool
    plan: dict[str, Any]
    recipe: dict[str, Any]


CASES = {
    "full on 2": Case("full", False, {"shares": [7, 5], "micro_batch": [2, 3]}, {}),
    "full packed on 5, one idle": Case("full", True, {"shares": [5, 4, 2, 1, 0], "micro_batch": [2, 3, 1, 1, 1]}, {"parallel__bucket_mb": 0.03}),
    "full on 4, measured": Case(
        "full", False, {"shares": [8, 2, 1, 1], "measured": True, "nodes": ["a", "b", "c", "c"]}, {"parallel__micro_batch": "auto"}
    ),
    "lora on 3": Case("lora", False, {"shares": [6, 4, 2], "micro_batch": [4, 3, 2]}, {}),
    "lora packed on 2, fused loss": Case("lora", True, {"shares": [3, 9], "micro_batch": 2}, {"train__fused_loss": True}),
    "lora on 5, measured within memory": Case(
        "lora", False, {"shares": [4, 3, 2, 2, 1], "measured": True, "token_caps": [None, 700, 500, 400, 300]},
        {"parallel__micro_batch": "auto"},
    ),
    "qlora on 3, checkpointed": Case("qlora", False, {"shares": [1, 4, 7], "micro_batch": [1, 3, 2]}, {"train__gradient_checkpointing": True}),
    "qlora packed on 4": Case("qlora", True, {"shares": [5, 1, 3, 3], "micro_batch": [2, 1, 2, 3]}, {}),
    "full by zero2 on 3": Case("full", False, {"shares": [6, 4, 2], "micro_batch": [2, 1, 2], "strategy": "zero2"}, {}),
    "lora by zero2 on 3, one idle": Case("lora", False, {"shares": [8, 4, 0], "micro_batch": [3, 1, 2], "strategy": "zero2"}, {}),
    "full by zero3 on 3": Case("full", False, {"shares": [6, 4, 2], "micro_batch": [2, 1, 2], "strategy": "zero3"}, {}),
    "lora by fsdp on 3, checkpointed, fused loss": Case(
        "lora", False, {"shares": [6, 4, 2], "micro_batch": [2, 1, 2], "strategy": "fsdp"},
        {"train__gradient_checkpointing": True, "train__fused_loss": True},
    ),
    "full by hsdp on 2 and 2": Case(
        "full", False, {"shares": [5, 4, 2, 1], "micro_batch": [2, 1, 2, 1], "strategy": "hsdp", "nodes": ["a", "a", "b", "b"]}, {}
    ),
    "lora 8bit on 2": Case("lora 8bit", False, {"shares": [8, 4], "micro_batch": [3, 2]}, {"train__gradient_checkpointing": True}),
    "lora 8bit by zero3 on 2": Case("lora 8bit", False, {"shares": [7, 5], "micro_batch": [2, 3], "strategy": "zero3"}, {}),
    "qlora by zero3 on 2": Case("qlora", False, {"shares": [7, 5], "micro_batch": [2, 3], "strategy": "zero3"}, {}),
}  # fmt: skip
# Each strategy, each method and a rank that idles in a few steps; thirty of them for shares that move.
QUICK = {
    SHORT: ("full packed on 5, one idle", "qlora on 3, checkpointed", "full by zero2 on 3", "full by hsdp on 2 and 2"),
    LONG: ("lora on 5, measured within memory",),
}  # fmt: skip


def lengths(cases: Iterable[str], quick: dict[int, tuple[str, ...]]) -> list[Any]:
    """(case, steps): the quick ones, and all in the long form. It holds the first gradient, too; after six steps weights that begin at zero
    are so small that rounding alone is 1e-5 of them (qlora, packed, in a pipeline)."""
    return [
        pytest.param(name, steps, marks=() if name in quick[steps] else pytest.mark.thorough)
        for name in cases for steps in (SHORT, LONG) if steps == LONG or name in quick[SHORT]
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "steps"), lengths(CASES, QUICK))
def test_the_training_is_that_of_one_process(
    name: str, steps: int, forks: harness.Forks, reference: Reference, tmp_path: Path, model: Path, data: Path
) -> None:
    case = CASES[name]
    recipe = COMMON | LENGTH[steps] | method(case.kind) | {"data__packing": case.packing} | case.recipe
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    forks.train(run, 1, **case.plan)
    ranks = len(case.plan["shares"])
    assert_the_same(run, reference(case.kind, case.packing, steps), {1: (1, ranks)}, steps)
    assert_every_sample_once_per_epoch(run, ranks, steps)
    rows = [[line["share"] for line in harness.lines(run, 1, rank, "metrics.jsonl", "train")] for rank in range(ranks)]
    if not case.plan.get("measured"):
        assert [rank[0] for rank in rows] == case.plan["shares"]
    elif steps == LONG:  # in a few steps there may be no time for a second assignment
        assert harness.lines(run, 1, 0, "metrics.jsonl", "shares"), "a new assignment began while it trained"
        assert len({rows[0][step] for step in range(LONG) if sum(rank[step] for rank in rows) == 12}) > 1
    shutil.rmtree(run / "checkpoints")


def test_a_run_goes_on_elsewhere(forks: harness.Forks, reference: Reference, tmp_path: Path, model: Path, data: Path) -> None:
    """One process, then three on two nodes, then five whose speeds are measured: other shares, nodes and numbers of ranks each time."""
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "lora", "data__packing": False}
    run, one = harness.make_run(tmp_path / "run", model, data, **recipe), reference("lora", False, SHORT)
    took_over = "checkpoints/step-00000002"
    shutil.copytree(one / took_over, run / took_over)
    forks.train(run, 2, [2, 7, 3], micro_batch=[3, 2, 1], nodes=["b", "c", "c"], resume_step=2)
    forks.train(run, 3, [5, 2, 2, 2, 1], nodes=["d", "d", "b", "e", "e"], measured=True, resume_step=4)
    assert_the_same(run, one, {2: (3, 3), 3: (5, 5)}, SHORT)
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("start", ["forked", pytest.param("two torchruns", marks=pytest.mark.thorough)])
def test_two_nodes_with_different_numbers_of_processes(
    start: str, forks: harness.Forks, reference: Reference, tmp_path: Path, model: Path, data: Path
) -> None:
    """Two ranks here and one there, each node with its own folder and checkpoints."""
    run = harness.make_run(tmp_path / "run", model, data, **COMMON | LENGTH[SHORT], method__kind="lora")
    places = ["alpha", "alpha", "beta"]
    if start == "forked":
        forks.train(run, 1, [5, 3, 4], micro_batch=[2, 3, 3], nodes=places)
    else:
        harness.make_plan(run, 1, [5, 3, 4], micro_batch=[2, 3, 3], nodes=places)
        port = harness.free_port()
        nodes = [harness.start_node(run, 1, places, node, port) for node in ("alpha", "beta")]
        ended = [harness.finish(node) for node in nodes]
        assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
        harness.collect(run, 1, places)
    beta = harness.folder_of(run, "beta", places)
    assert harness.relative_error(harness.weights(beta, SHORT), harness.weights(run, SHORT)) == 0, "copies of each other"
    assert [harness.lines(run, 1, rank, "metrics.jsonl", "train")[0]["node"] for rank in range(3)] == places
    assert_the_same(run, reference("lora", False, SHORT), {1: (1, 3)}, SHORT)
    assert_every_sample_once_per_epoch(run, 3, SHORT)


def assert_the_same(
    run: Path, one: Path, attempts: dict[int, tuple[int, int]], steps: int, clipped_at: float = CLIPPED_AT, worse: float = 1.0
) -> None:
    """`attempts` names the first step that counts of each attempt, and its ranks; `worse`: how much more of a gradient is rounding than usual."""
    expected, sampled = harness.losses(one, 1), harness.samples(one, 1, 1)
    assert list(expected) == list(range(1, steps + 1))
    found: dict[int, float] = {}
    norms: dict[int, float] = {}
    for attempt, (first, ranks) in attempts.items():
        lines = [harness.lines(run, attempt, rank, "metrics.jsonl", "train") for rank in range(ranks)]
        for key in ("loss", "grad_norm", "learning_rate"):
            assert all([line[key] for line in rank] == [line[key] for line in lines[0]] for rank in lines), f"{key} on all ranks"
        assert lines[0][0]["step"] == first, "no step is done again"
        found |= harness.losses(run, attempt)
        norms |= {line["step"]: line["grad_norm"] for line in lines[0]}
        taken = harness.samples(run, attempt, ranks)
        assert taken == {step: sampled[step] for step in taken}, "the same global batches"
    begin = min(first for first, _ in attempts.values())
    assert found == pytest.approx({step: expected[step] for step in range(begin, steps + 1)}, rel=AFTER_ALL)
    # Before clipping: Adam and clipping hide a gradient that is too long.
    lengths = {line["step"]: line["grad_norm"] for line in harness.lines(one, 1, 0, "metrics.jsonl", "train")}
    assert norms == pytest.approx({step: lengths[step] for step in norms}, rel=AFTER_ALL)
    if begin == 1:
        assert norms[1] > clipped_at
        assert (found[1], norms[1]) == pytest.approx((expected[1], lengths[1]), rel=worse * AFTER_ONE)
    if begin == 1 and steps == SHORT:
        assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) <= worse * AFTER_ONE
        assert harness.whole_error(harness.weights(run, 1), harness.weights(one, 1)) <= AFTER_ONE
    assert harness.relative_error(harness.weights(run, steps), harness.weights(one, steps)) <= worse * AFTER_ALL
    last, first_weights = max(attempts), harness.weights(one, LENGTH[steps]["checkpoint__every_steps"])
    moved, should = ({name: tensor - first_weights[name] for name, tensor in harness.weights(which, steps).items()} for which in (run, one))
    assert harness.whole_error(moved, should) <= worse * AFTER_ALL, "what training has changed, not what was there before"
    held_out = [harness.lines(which, attempt, 0, "metrics.jsonl", "eval")[-1]["eval_loss"] for which, attempt in ((run, last), (one, 1))]
    assert held_out[0] == pytest.approx(held_out[1], rel=AFTER_ALL)


def assert_every_sample_once_per_epoch(run: Path, ranks: int, steps: int) -> None:
    per_epoch: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in harness.lines(run, 1, rank, "samples.jsonl"):
            per_epoch.setdefault(line["epoch"], []).extend(line["ids"])
    everyone = sorted(per_epoch[0])
    assert len(everyone) == len(set(everyone)) == 40, "44 chats, of which a tenth is held out"
    whole = max(per_epoch)  # the last epoch is cut short by the number of steps
    assert whole >= steps // 4
    for epoch, ids in per_epoch.items():
        assert sorted(ids) == everyone if epoch < whole else len(ids) == len(set(ids)) <= 40, f"epoch {epoch}"
