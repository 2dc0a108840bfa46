"""The itemised estimate: each formula by hand, and that it moves the right way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.protocol import memory_items
from homelab.shared.protocol.memory_items import (
    ACTIVATIONS,
    ADAPTERS,
    BASE_WEIGHTS,
    CASTED_WEIGHTS,
    DEQUANTISATION,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    STEP,
    WORKING_SET,
)
from homelab.shared.recipe import Method, Train
from tests import builders

SMOL = builders.architecture("HuggingFaceTB/SmolLM2-135M")
LLAMA_7B = builders.architecture("meta-llama/Llama-2-7b-hf")
LLAMA_8B = builders.architecture("meta-llama/Llama-3.1-8B")
assert SMOL and LLAMA_7B and LLAMA_8B


def train(**changes: Any) -> Train:
    return Train(**{"global_batch": 32, "steps": 1, "learning_rate": 1e-4, "seq_len": 512, "fused_loss": False, **changes})


def items(architecture: Architecture, method: Method, settings: Train, **changes: Any) -> dict[str, int]:
    situation = {"precision": "bf16", "device": "cuda", "micro_batch": 1, "world_size": 3, **changes}
    return {item.name: item.size_bytes for item in rank_memory.estimate(architecture, method, settings, RankSetup(**situation))}


QLORA, LORA, FULL = Method(kind="qlora"), Method(kind="lora"), Method(kind="full")
EIGHT_BIT = Method(kind="lora", base="8bit")


def test_base_weights() -> None:
    assert rank_memory.base_weight_bytes(LLAMA_8B, QLORA, "bf16") / 1e9 == pytest.approx(5.70, abs=0.005)
    scales = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)  # one for each output of a layer's matrices
    assert rank_memory.base_weight_bytes(LLAMA_8B, EIGHT_BIT, "bf16") == LLAMA_8B.linear_parameters + 4 * scales + 2 * (
        8_030_261_248 - LLAMA_8B.linear_parameters
    )
    assert rank_memory.base_weight_bytes(LLAMA_8B, LORA, "bf16") == 2 * 8_030_261_248
    assert rank_memory.base_weight_bytes(LLAMA_8B, LORA, "fp32") == 4 * 8_030_261_248
    assert rank_memory.base_weight_bytes(LLAMA_8B, FULL, "bf16") == 4 * 8_030_261_248


def test_lora_state_is_tens_of_megabytes_not_gigabytes() -> None:
    found = items(LLAMA_7B, Method(kind="lora", targets=("q_proj", "v_proj")), train())
    trainable = 8_388_608
    assert found[ADAPTERS] == found[GRADIENTS] == 4 * trainable
    assert found[OPTIMIZER] == 8 * trainable


def test_more_ranks_cost_a_communicator_and_nothing_else() -> None:
    alone, three = items(SMOL, LORA, train(), world_size=1), items(SMOL, LORA, train(), world_size=3)
    assert three == {**alone, rank_memory.COMMUNICATOR: rank_memory.COMMUNICATOR_BYTES}


def test_full_training_holds_sixteen_bytes_per_parameter_in_fp32() -> None:
    found = items(SMOL, FULL, train(), precision="fp32", device="cpu", world_size=1)
    state = found[BASE_WEIGHTS] + found[GRADIENTS] + found[OPTIMIZER]
    assert state == 16 * 134_515_008
    assert ADAPTERS not in found and CASTED_WEIGHTS not in found


def test_optimizers() -> None:
    adamw = rank_memory.optimizer_bytes(LLAMA_8B, LORA, train(), "cuda")
    eight_bit = rank_memory.optimizer_bytes(LLAMA_8B, LORA, train(optimizer="adamw_8bit"), "cuda")
    paged = rank_memory.optimizer_bytes(LLAMA_8B, LORA, train(optimizer="paged_adamw_8bit"), "cuda")
    assert adamw == 8 * 41_943_040
    assert eight_bit == round((2 + 2 * 4 / 256) * 41_943_040)
    # Only what has 100,000 elements or more is paged: with r=16 the sides of 14336 features.
    assert paged == round((2 + 2 * 4 / 256) * 16 * 32 * (9 * 4096 + 2 * 1024))
    assert rank_memory.optimizer_bytes(LLAMA_8B, LORA, train(optimizer="paged_adamw_8bit"), "cpu") == eight_bit
    # Tensors below 4096 elements keep fp32 state.
    small = Method(kind="lora", rank=1)
    assert rank_memory.optimizer_bytes(SMOL, small, train(optimizer="adamw_8bit"), "cpu") == rank_memory.optimizer_bytes(
        SMOL, small, train(), "cpu"
    )


def test_checkpointing_keeps_one_hidden_state_per_layer() -> None:
    found = items(LLAMA_7B, LORA, train(), micro_batch=2)
    assert found[ACTIVATIONS] == 2 * 512 * 4096 * (2 * 32 + 8)
    without = items(LLAMA_7B, LORA, train(gradient_checkpointing=False), micro_batch=2)
    assert without[ACTIVATIONS] > 10 * found[ACTIVATIONS]
    assert without[WORKING_SET] < found[WORKING_SET]


def test_the_peak_is_the_larger_of_logits_and_a_layers_work() -> None:
    found = items(SMOL, LORA, train())
    tokens, logits = 512, 12 * 512 * 49152
    assert found[WORKING_SET] < logits
    assert found[WORKING_SET] + found[LOGITS] == logits
    assert tokens * SMOL.hidden < found[WORKING_SET]
    narrow = Architecture(4096, 2, 32, 32, 128, 11008, 64, True)
    assert LOGITS not in items(narrow, LORA, train())


def test_only_a_quantised_base_is_dequantised() -> None:
    # As far as it is more than the adapter's part of a gradient, which comes when the matrix is gone.
    assert items(LLAMA_8B, QLORA, train())[DEQUANTISATION] == 2 * 4096 * 14336 - 2 * 512 * 14336
    assert DEQUANTISATION not in items(LLAMA_8B, QLORA, train(seq_len=4096))
    assert items(LLAMA_8B, EIGHT_BIT, train())[DEQUANTISATION] == items(LLAMA_8B, QLORA, train())[DEQUANTISATION]
    assert DEQUANTISATION not in items(LLAMA_8B, LORA, train())


def test_a_cpu_has_a_process_instead_of_a_context() -> None:
    cpu, cuda = items(SMOL, LORA, train(), device="cpu"), items(SMOL, LORA, train())
    of_cards = {rank_memory.CONTEXT, rank_memory.COMMUNICATOR, rank_memory.WORKSPACES, rank_memory.ALLOCATOR}
    assert rank_memory.PROCESS in cpu and not of_cards & cpu.keys()
    assert rank_memory.PROCESS not in cuda and of_cards <= cuda.keys()


def test_what_others_hold_and_what_was_measured() -> None:
    plain = items(SMOL, LORA, train())
    found = items(SMOL, LORA, train(), held_by_others_bytes=123, measured={rank_memory.CONTEXT: 456})
    assert found == {**plain, memory_items.HELD: 123, rank_memory.CONTEXT: 456}


def test_an_8b_qlora_fits_twelve_gigabytes_and_8b_lora_does_not() -> None:
    def largest(method: Method, gib: float) -> int:
        return rank_memory.largest_micro_batch(
            LLAMA_8B, method, train(), RankSetup("bf16", "cuda", world_size=3), share=8, available_bytes=int(gib * 2**30)
        )

    assert largest(QLORA, 12) >= 1
    assert largest(LORA, 12) == 0
    assert largest(QLORA, 4) == 0
    assert largest(QLORA, 80) == 8


@pytest.mark.timeout(60)
@given(
    share=st.integers(1, 70),
    available_bytes=st.integers(0, 40 * 2**30),
    kind=st.sampled_from(["qlora", "lora", "full"]),
    checkpointing=st.booleans(),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
)
def test_the_largest_micro_batch_fits_and_the_next_does_not(
    share: int, available_bytes: int, kind: Any, checkpointing: bool, precision: str
) -> None:
    method, settings = Method(kind=kind), train(gradient_checkpointing=checkpointing)
    best = rank_memory.largest_micro_batch(
        SMOL, method, settings, RankSetup(precision, "cuda", world_size=2), share=share, available_bytes=available_bytes
    )

    def fits(rows: int) -> bool:
        found = items(SMOL, method, settings, micro_batch=rows, precision=precision, world_size=2)
        return sum(found.values()) <= available_bytes

    assert 0 <= best <= share and (best == share or best & (best - 1) == 0)
    assert best == 0 or fits(best)
    assert best == share or not fits(max(1, min(2 * best, share)))


@given(
    rows=st.integers(1, 40),
    seq_len=st.integers(8, 4096),
    kind=st.sampled_from(["qlora", "lora", "full"]),
    checkpointing=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_more_rows_never_need_less(rows: int, seq_len: int, kind: Any, checkpointing: bool, device: str) -> None:
    method, settings = Method(kind=kind), train(seq_len=seq_len, gradient_checkpointing=checkpointing)
    fewer = items(SMOL, method, settings, micro_batch=rows, device=device)
    more = items(SMOL, method, settings, micro_batch=rows + 1, device=device)
    assert sum(fewer.values()) <= sum(more.values())
    assert all(size > 0 for size in fewer.values())


def test_a_fused_loss_has_a_chunk_of_the_logits() -> None:
    plain, fused = (items(LLAMA_8B, QLORA, train(seq_len=4096)), items(LLAMA_8B, QLORA, train(seq_len=4096, fused_loss=True)))
    saved = sum(plain.values()) - sum(fused.values())
    assert LOGITS not in fused, "a layer's work is larger than one chunk"
    assert saved == pytest.approx(1.10 * plain[LOGITS], rel=1e-6), "and the allocator's part of it"
    # As many logits as a chunk has: their gradients, 2 bytes more, are made while the copies of all adapters are there.
    short = train(seq_len=16)
    more = {CASTED_WEIGHTS: 2 * 16 * LLAMA_8B.vocabulary}
    alike = items(LLAMA_8B, QLORA, short)
    assert items(LLAMA_8B, QLORA, replace(short, fused_loss=True)) == {name: size + more.get(name, 0) for name, size in alike.items()}


def test_adapters_of_a_4_bit_matrix_keep_no_copies_on_a_card() -> None:
    without = train(gradient_checkpointing=False)
    on_card = {kind: items(LLAMA_8B, Method(kind=kind), without)[ACTIVATIONS] for kind in ("lora", "qlora")}
    # q, k, v share one input instead of three, gate and up one instead of two, and o_proj reads what attention keeps.
    assert on_card["lora"] - on_card["qlora"] == 512 * 32 * 2 * 4 * 4096
    on_cpu = {kind: items(LLAMA_8B, Method(kind=kind), without, device="cpu")[ACTIVATIONS] for kind in ("lora", "qlora")}
    assert on_cpu["lora"] == on_cpu["qlora"] == on_card["lora"]


def test_rows_of_one_length_need_no_mask() -> None:
    one, packed = items(LLAMA_8B, LORA, train()), items(LLAMA_8B, LORA, train(), masked=True)
    # k and v are repeated for the query heads, and a layer keeps its row of the mask.
    more = 512 * (2 * 2 * (4096 - 1024) + 2 * 512)
    assert packed[WORKING_SET] - one[WORKING_SET] == more
    assert items(LLAMA_8B, LORA, train(), micro_batch=2) == items(LLAMA_8B, LORA, train(), micro_batch=2, masked=True)


def test_the_optimizers_step_makes_nothing_on_a_gpu_in_fp16_either() -> None:
    settings = train(seq_len=64)
    half, brain = (items(SMOL, FULL, settings, precision=precision) for precision in ("fp16", "bf16"))
    assert half == brain, "no roots of second moments: the step is fused"
    assert STEP not in items(SMOL, LORA, settings, precision="fp16")


def test_powersgd_holds_one_more_gradient() -> None:
    plain, compressed = items(SMOL, FULL, train()), items(SMOL, FULL, train(), compress="powersgd")
    assert compressed == {**plain, rank_memory.REMAINDER: plain[GRADIENTS]}
    assert items(SMOL, FULL, train(), compress="powersgd", world_size=1) == items(SMOL, FULL, train(), world_size=1)
