"""Seconds on the wire, by hand; and a verdict that says them."""

from __future__ import annotations

import pytest

from homelab.config.recipe import Method
from homelab.errors import HomelabError, InputError
from homelab.planning import network
from homelab.planning.architecture import known

LLAMA_8B = known("meta-llama/Llama-3.1-8B")
LLAMA_7B = known("meta-llama/Llama-2-7b-hf")
assert LLAMA_8B and LLAMA_7B
LORA, QLORA, FULL = Method(kind="lora"), Method(kind="qlora"), Method(kind="full")


def test_ring_all_reduce() -> None:
    assert network.all_reduce_s(117.6e6, 1) == 0
    assert network.all_reduce_s(117.6e6, 2) == pytest.approx(1)
    assert network.all_reduce_s(117.6e6, 4) == pytest.approx(1.5)
    assert network.all_reduce_s(1e9, 2, bytes_per_s=1e9) == pytest.approx(1)
    assert network.gather_s(117.6e6, 2) == pytest.approx(0.5)


def test_8b_on_three_nodes_and_one_gigabit() -> None:
    assert network.gradient_bytes(LLAMA_8B, LORA) == 4 * 41_943_040
    assert network.all_reduce_s(network.gradient_bytes(LLAMA_8B, LORA, 2), 3) == pytest.approx(0.95, abs=0.005)
    assert network.all_reduce_s(network.gradient_bytes(LLAMA_8B, LORA), 3) == pytest.approx(1.90, abs=0.005)
    assert network.all_reduce_s(network.gradient_bytes(LLAMA_8B, FULL, 2), 3) == pytest.approx(182, abs=0.5)
    assert network.sharded_micro_batch_s(LLAMA_8B, QLORA, "bf16", 3) == pytest.approx(65, abs=0.5)


def test_7b_on_query_and_value_sends_tens_of_megabytes() -> None:
    method = Method(kind="lora", targets=("q_proj", "v_proj"))
    assert network.gradient_bytes(LLAMA_7B, method) == 33_554_432
    assert network.gradient_bytes(LLAMA_7B, method, bytes_per_element=2) == 16_777_216


def test_auto_is_ddp_and_says_what_it_costs() -> None:
    choice = network.verdict("auto", LLAMA_8B, QLORA, "bf16", 3)
    assert (choice.subject, choice.value) == ("strategy", "ddp")
    assert "168 MB" in choice.because and "1.9 s per step" in choice.because and "3 ranks" in choice.because
    assert "5.7 GB" in choice.because and "65 s per micro-batch" in choice.because


def test_one_rank_sends_nothing_and_an_unknown_model_has_no_figures() -> None:
    assert "nothing goes over the wire" in network.verdict("ddp", LLAMA_8B, QLORA, "bf16", 1).because
    assert network.verdict("auto", None, None, "fp32", 3).value == "ddp"
    one_machine = network.verdict("auto", LLAMA_8B, QLORA, "bf16", 2, machines=1).because
    assert one_machine == "2 ranks on one machine: nothing goes over the LAN"


@pytest.mark.parametrize(
    ("strategy", "price"),
    [
        ("fsdp", "FSDP would gather 5.7 GB"),
        ("zero3", "ZeRO-3 would gather 5.7 GB"),
        ("zero2", "ZeRO-2 would scatter 168 MB"),
    ],
)
def test_sharding_is_refused_with_its_price(strategy: str, price: str) -> None:
    with pytest.raises(InputError) as caught:
        network.verdict(strategy, LLAMA_8B, QLORA, "bf16", 3)
    assert price in caught.value.message and "ddp only" in caught.value.message
    assert caught.value.hint == 'strategy = "auto"' and "strategy" in caught.value.where
    with pytest.raises(InputError, match="ddp only"):
        network.verdict(strategy, None, None, "bf16", 3)


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(HomelabError) as caught:
        network.verdict("auto", LLAMA_8B, LORA, "bf16", 3, fits=False)
    assert "does not fit" in caught.value.message and "gather 16.1 GB" in caught.value.message
    assert 'kind = "qlora"' in caught.value.hint


def test_a_faster_wire() -> None:
    choice = network.verdict("auto", LLAMA_8B, QLORA, "bf16", 3, wire=network.Wire(1.176e9, True))
    assert "0.19 s per step" in choice.because and "1176 MB/s" in choice.because
