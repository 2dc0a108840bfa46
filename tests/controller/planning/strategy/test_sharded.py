"""The strategies that divide a model, as the planner sees them: what they cost, when "auto" takes one, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.machines import machines
from homelab.controller.planning.memory import division, rank_memory
from homelab.controller.planning.model import families
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.registry import STRATEGIES, Selection
from homelab.controller.planning.types import StrategyCost
from homelab.controller.planning.work import job
from homelab.controller.planning.work.job import Job, TrainingJob
from tests import builders
from tests.builders import NAMES
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

MODEL = "HuggingFaceTB/SmolLM2-1.7B"


def job_of(cards_gb: Sequence[Sequence[float]], *, precision: str = "bf16", strategy: str = "auto", **tables: Any) -> Job:
    """A full training of 1.7B on machines with these cards, each given in GB of memory."""
    names = NAMES[: len(cards_gb)]
    nodes = {
        name: {"gpus": [{"model": "RTX 4090", "vram_gb": vram_gb} for vram_gb in cards]}
        for name, cards in zip(names, cards_gb, strict=True)
    }
    tables.setdefault("method", {"kind": "full"})
    recipe = builders.recipe(
        model={"name": MODEL}, parallel={"strategy": strategy, **tables.pop("parallel", {})},
        train={"global_batch": 12, "learning_rate": 1e-5, "steps": 10, **tables.pop("train", {})}, **tables,
    )  # fmt: skip
    inputs = builders.plan_inputs(builders.cluster(names, nodes=nodes), recipe, {})
    return job.of(inputs, machines.choose(inputs), precision)


def chosen(job_: Job) -> Selection:
    return registry.choose_strategy(job_)


def prices(job_: Job) -> dict[str, StrategyCost]:
    return {price.name: price for price in chosen(job_).prices}


@pytest.mark.parametrize(
    ("cards_gb", "strategy"),
    [
        ([[40], [40], [40]], "ddp"),  # all fits whole: nothing is divided
        (
            [[24], [24], [24]],
            "pipeline",
        ),  # 27 GB of state do not fit into 24, a third of them does; zero2 sends it over the wire in every step
        ([[24, 24, 24]], "zero2"),
        ([[40, 40]], "ddp"),
    ],
)
def test_auto_divides_only_what_does_not_fit_whole(cards_gb: list[list[float]], strategy: str) -> None:
    selection = chosen(job_of(cards_gb))
    assert selection.strategy.name == strategy
    assert all(rank.token_cap is None and rank.memory and rank.memory.fits for rank in selection.assignment.ranks)


def test_per_pass_on_a_wire_is_nobodys_choice_but_the_recipes() -> None:
    three = job_of([[24], [24], [24]])
    assert STRATEGIES["zero3"].automatic(three) == "never"
    assert STRATEGIES["zero3"].automatic(job_of([[24, 24, 24]])) == "fallback"
    assert chosen(job_of([[24], [24], [24]], strategy="zero3")).strategy.name == "zero3"


def test_every_strategy_has_its_price_or_its_reason() -> None:
    of = prices(job_of([[40], [40], [40]]))
    assert list(of) == ["ddp", "zero2", "zero3", "hsdp", "pipeline"]
    ddp, zero2, zero3 = of["ddp"], of["zero2"], of["zero3"]
    assert ddp.state_bytes and zero2.state_bytes and zero3.state_bytes and ddp.wire_s and zero2.wire_s and zero3.wire_s
    assert zero3.state_bytes < zero2.state_bytes < ddp.state_bytes
    assert zero2.wire_s < ddp.wire_s < zero3.wire_s
    assert of["hsdp"].refused and "the same number of cards" in of["hsdp"].refused


def test_one_rank_has_nothing_to_divide() -> None:
    assert chosen(job_of([[40]])).prices == ()


def test_hsdp_wants_equal_machines_of_several_cards() -> None:
    assert chosen(job_of([[24, 24], [24, 24]], strategy="hsdp")).strategy.name == "hsdp"
    for cards_gb in ([[40], [40]], [[40, 40], [40]]):
        with pytest.raises(InputError, match="the same number of cards, two or more"):
            chosen(job_of(cards_gb, strategy="hsdp"))


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"parallel": {"compress": "bf16"}}, 'compress = "bf16"'),
        ({"parallel": {"bucket_mb": 5.0}}, "bucket_mb is a key of ddp"),
        ({"train": {"optimizer": "adamw_8bit"}}, "rounds in blocks of 256"),
        ({"method": {"kind": "lora", "backend": "unsloth"}}, "Unsloth"),
    ],
)
def test_what_would_be_another_curve_is_refused(strategy: str, tables: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as refusal:
        chosen(job_of([[40], [40]], strategy=strategy, **tables))
    assert refusal.value.hint and refusal.value.where


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_a_torch_without_what_shards_need_is_named(strategy: str) -> None:
    """An RTX 50 with a driver of 570 gets torch 2.11."""
    recipe, old = healthy.recipe(parallel={"strategy": strategy}), NAMES[1]
    with pytest.raises(InputError, match=rf"needs torch 2\.13 or newer, and {old} has 2\.11\.0\+cu128") as refusal:
        make(healthy.packages(healthy.gpu(), old, torch="2.11.0+cu128"), recipe)
    assert "580" in refusal.value.hint and "homelab setup" in refusal.value.hint
    for other in ("2.13.0+cu130", "3.0.1", None, "from source"):
        assert make(healthy.packages(healthy.gpu(), old, torch=other), recipe).strategy == strategy


def test_bytes_of_a_step_by_hand() -> None:
    whole = job_of([[40], [40]])
    assert isinstance(whole, TrainingJob) and whole.shape
    linear, total = whole.shape.linear_parameters, whole.shape.total
    zero2, zero3 = STRATEGIES["zero2"], STRATEGIES["zero3"]
    # Linear layers arrive in bf16, the rest in fp32; the gradient leaves in fp32.
    assert zero2.step_bytes(whole, 4) == 2 * linear + 4 * (total - linear) + 4 * total
    assert zero2.step_bytes(whole, 1) == zero2.step_bytes(whole, 4)
    assert zero3.step_bytes(whole, 4) == 4 * (zero3.step_bytes(whole, 1) or 0)
    assert zero2.wire_s(100, 4, 25) == pytest.approx(3)
    lora = job_of([[40], [40]], method={"kind": "lora"})
    assert isinstance(lora, TrainingJob) and lora.shape
    trained = rank_memory.trainable_parameters(lora.shape, lora.recipe.method)
    assert zero2.step_bytes(lora, 1) == (2 + 4) * trained


def test_a_division_counts_ranks_or_the_cards_of_a_machine() -> None:
    nodes = ["a", "a", "b", "b"]
    assert division.of("ddp", nodes) == division.WHOLE
    assert division.of("zero2", nodes) == division.Division(4)
    assert division.of("fsdp", nodes) == division.of("zero3", nodes) == division.Division(4, per_pass=True)
    assert division.of("hsdp", nodes) == division.Division(2, per_pass=True)


BF16 = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3, "precision": "bf16"}


def with_model(seen: Any, **config: Any) -> Any:
    """The evidence in which every node has the model, with these keys in its config.json."""
    for name in NAMES:
        seen = healthy.with_facts(seen, name, model={"found": True, "config": {**healthy.LLAMA, **config}})
    return seen


def memory_of(seen: Any, name: str, available_gb: float) -> Any:
    """The evidence with a machine of 64 GB, of which so many are free."""
    return healthy.with_facts(seen, name, system={"memory_total_bytes": 64 * 10**9, "memory_available_bytes": int(available_gb * 10**9)})


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_machine_without_room_to_read_the_model_is_named(strategy: str) -> None:
    """Full training makes fp32 weights of it, on the host where the cards get parts alone."""
    recipe, small = healthy.recipe(method={"kind": "full"}, parallel={"strategy": strategy}, train=BF16), NAMES[1]
    total = families.from_config(healthy.LLAMA)
    assert total is not None
    enough_gb = 4 * total.total / 1e9
    assert make(memory_of(with_model(healthy.gpu()), small, 1.1 * enough_gb), recipe).strategy == strategy
    lacking = memory_of(with_model(healthy.gpu()), small, 0.9 * enough_gb)
    if strategy == "zero2":
        assert make(lacking, recipe).strategy == strategy
        return
    with pytest.raises(InputError, match=f"{small} needs .* GB for that") as refusal:
        make(lacking, recipe)
    assert refusal.value.where.startswith(f"node {small}") and 'kind = "lora"' in refusal.value.hint


@pytest.mark.parametrize(("dtype", "fits"), [("bfloat16", True), ("float32", False)])
def test_files_in_the_training_s_precision_need_no_memory_to_be_read(dtype: str, fits: bool) -> None:
    recipe, seen = healthy.recipe(method={"kind": "lora"}, parallel={"strategy": "zero3"}, train=BF16), healthy.gpu()
    for name in NAMES:
        seen = memory_of(with_model(seen, dtype=dtype), name, 0.0)
    if fits:
        assert make(seen, recipe).strategy == "zero3"
    else:
        with pytest.raises(InputError, match="reads the model into the memory of each machine"):
            make(seen, recipe)


@pytest.mark.parametrize(
    ("seen", "strategy", "balance"),
    [
        (healthy.gpu(), "zero2", "measured"), (healthy.gpu(), "zero3", "fixed"), (healthy.gpu(), "fsdp", "fixed"), (healthy.gpu(), "ddp", "measured"),
        (healthy.cpu(), "zero3", "measured"),
    ],
)  # fmt: skip
def test_shares_do_not_follow_seconds_that_hold_waits(seen: Any, strategy: str, balance: str) -> None:
    made = make(seen, healthy.recipe(parallel={"strategy": strategy}))
    (choice,) = [choice for choice in made.choices if choice.subject == "balance"]
    assert (made.balance, choice.value) == (balance, balance) and ("waits" in choice.because) == (balance == "fixed")
    by_hand = make(seen, healthy.recipe(parallel={"strategy": strategy, "shares": "equal"}))
    assert by_hand.balance == "fixed" and not [choice for choice in by_hand.choices if choice.subject == "balance"]
