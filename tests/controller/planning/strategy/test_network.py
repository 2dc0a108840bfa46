"""Seconds on the wire, by hand; and the strategy's reason that says them."""

from __future__ import annotations

import pytest

from homelab.controller.planning.machines import machines
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.ddp import Ddp
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.work import job
from homelab.controller.planning.work.job import Job
from homelab.shared.recipe import Method
from tests import builders
from tests.builders import NAMES

LLAMA_8B = builders.architecture("meta-llama/Llama-3.1-8B")
LLAMA_7B = builders.architecture("meta-llama/Llama-2-7b-hf")
assert LLAMA_8B and LLAMA_7B
LORA, QLORA, FULL = Method(kind="lora"), Method(kind="qlora"), Method(kind="full")


def test_ring_all_reduce() -> None:
    assert network_cost.all_reduce_s(117.6e6, 1) == 0
    assert network_cost.all_reduce_s(117.6e6, 2) == pytest.approx(1)
    assert network_cost.all_reduce_s(117.6e6, 4) == pytest.approx(1.5)
    assert network_cost.all_reduce_s(1e9, 2, bytes_per_s=1e9) == pytest.approx(1)
    assert network_cost.gather_s(117.6e6, 2) == pytest.approx(0.5)


def test_8b_on_three_nodes_and_one_gigabit() -> None:
    assert network_cost.gradient_bytes(LLAMA_8B, LORA) == 4 * 41_943_040
    assert network_cost.all_reduce_s(network_cost.gradient_bytes(LLAMA_8B, LORA, 2), 3) == pytest.approx(0.95, abs=0.005)
    assert network_cost.all_reduce_s(network_cost.gradient_bytes(LLAMA_8B, LORA), 3) == pytest.approx(1.90, abs=0.005)
    assert network_cost.all_reduce_s(network_cost.gradient_bytes(LLAMA_8B, FULL, 2), 3) == pytest.approx(182, abs=0.5)
    assert network_cost.sharded_micro_batch_s(LLAMA_8B, QLORA, "bf16", 3) == pytest.approx(65, abs=0.5)


def test_7b_on_query_and_value_sends_tens_of_megabytes() -> None:
    method = Method(kind="lora", targets=("q_proj", "v_proj"))
    assert network_cost.gradient_bytes(LLAMA_7B, method) == 33_554_432
    assert network_cost.gradient_bytes(LLAMA_7B, method, bytes_per_element=2) == 16_777_216


def job_of(
    count: int = 3, *, strategy: str = "auto", model: str = "meta-llama/Llama-3.1-8B", cards: int = 1, speed: float | None = None
) -> Job:
    """A QLoRA in bf16 on so many machines that were not asked, with so many cards each."""
    names = NAMES[:count]
    gpus = [{"model": "RTX 4090", "vram_gb": 24}] * cards
    recipe = builders.recipe(model={"name": model}, method={"kind": "qlora"}, parallel={"strategy": strategy})
    pairs = {} if speed is None else {(a, b): speed for a in names for b in names if a != b}
    inputs = builders.plan_inputs(builders.cluster(names, nodes={name: {"gpus": gpus} for name in names}), recipe, {}, throughputs=pairs)
    return job.of(inputs, machines.choose(inputs), "bf16")


def test_auto_is_ddp_and_says_what_it_costs() -> None:
    assert registry.choose_strategy(job_of()).choice.value == "ddp"
    because = Ddp().because(job_of())
    assert "168 MB" in because and "1.9 s per step" in because and "3 ranks" in because
    assert "5.7 GB" in because and "65 s per micro-batch" in because


def test_one_rank_sends_nothing_and_an_unknown_model_has_no_figures() -> None:
    assert "nothing goes over the network" in Ddp().because(job_of(1))
    assert "the gradient's size is not known here" in Ddp().because(job_of(model="org/unknown"))
    assert Ddp().because(job_of(1, cards=2)) == "2 ranks on one machine: nothing goes over the LAN"


def test_a_faster_wire() -> None:
    because = Ddp().because(job_of(speed=1.176e9))
    assert "0.19 s per step" in because and "1176 MB/s" in because
