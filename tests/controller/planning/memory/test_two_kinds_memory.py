"""The memory of models with layers of two kinds: the formulas against dry runs of small ones, whose own bytes are those of a real step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.controller.planning.memory import rank_memory, streamed_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.families import from_config, known
from homelab.shared.protocol import memory_items
from homelab.shared.recipe import Method, Train
from homelab.worker.tools import memory_dry_run
from homelab.worker.tools.memory_dry_run import Situation

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "tie_word_embeddings": False, "max_position_embeddings": 2048, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "vocab_size": 3000,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
_WIDE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": _WIDE,
    "gemma4 with experts": {**_WIDE, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 96},
    "gemma3_text": {"sliding_window": 64, "layer_types": _WIDE["layer_types"], "query_pre_attn_scalar": 64},
    "qwen3_5_text": {},
    "wide": {"model_type": "qwen3_5_text", "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "attends": {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", *["full_attention"] * 3]},
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "dense first": {"model_type": "qwen3_next", **_EXPERTS, "mlp_only_layers": [0]},
}
LENGTH = 320
WITHIN = 0.05
# With checkpointing only inputs of the layers before it are there when a layer needs most: of four layers, that is a part which shows.
ABOVE = 0.13


def compared(family: str, kind: Any, precision: str, *, rows: int, checkpointing: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(by formulas, by a dry run): the items of a card."""
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    method = {"kind": kind, "base": "auto", "rank": 8, "alpha": 16, "dropout": 0.0, "targets": "all-linear", "backend": "auto"}
    train = {"seq_len": LENGTH, "gradient_checkpointing": checkpointing, "fused_loss": True, "optimizer": "adamw", "seed": 1}
    dry = memory_dry_run.dry_run(config, method, train, Situation("cuda", precision, micro_batch=rows, masked=rows > 1))
    shape = from_config(config)
    assert shape is not None
    asked = Train(global_batch=8, steps=1, learning_rate=1.0, seq_len=LENGTH, gradient_checkpointing=checkpointing, fused_loss=True)
    items = rank_memory.estimate(shape, Method(kind=kind, rank=8), asked, RankSetup(precision, "cuda", rows))
    return {item.name: item.size_bytes for item in items if item.name in rank_memory.SEEN_BY_A_DRY_RUN}, dry["items"]


CASES = [
    ("qwen3_5_text", "lora", "bf16", 1, False),
    ("gemma4_text", "lora", "bf16", 1, False),
    ("qwen3_5_moe_text", "qlora", "bf16", 3, False),
]
MORE = [
    (family, kind, precision, rows, False)
    for family in FAMILIES for kind in ("lora", "qlora", "full") for precision in ("bf16", "fp32") for rows in (1, 3)
    if (family, kind, precision, rows, False) not in CASES and not (kind == "qlora" and precision == "fp32")
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "kind", "precision", "rows", "checkpointing"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)]
)
def test_the_formulas_are_within_five_percent_of_a_dry_run(family: str, kind: str, precision: str, rows: int, checkpointing: bool) -> None:
    formulas, dry = compared(family, kind, precision, rows=rows, checkpointing=checkpointing)
    assert formulas[memory_items.BASE_WEIGHTS] == pytest.approx(dry[memory_items.BASE_WEIGHTS], rel=0.02)
    # A card's allocator rounds up the small ones of the heads' steps.
    assert formulas.get(memory_items.ADAPTERS, 0) == pytest.approx(dry.get(memory_items.ADAPTERS, 0), rel=0.03)
    assert sum(formulas.values()) == pytest.approx(sum(dry.values()), rel=WITHIN)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "kind", "precision", "rows"),
    [
        ("qwen3_5_text", "lora", "bf16", 1),
        *(
            pytest.param(family, kind, precision, rows, marks=pytest.mark.thorough)
            for family in FAMILIES for kind, precision in (("lora", "bf16"), ("lora", "fp32"), ("qlora", "bf16"), ("full", "bf16")) for rows in (1, 3)
            if (family, kind, precision, rows) != ("qwen3_5_text", "lora", "bf16", 1)
        ),
    ],
)  # fmt: skip
def test_with_checkpointing_they_are_not_too_low(family: str, kind: str, precision: str, rows: int) -> None:
    formulas, dry = compared(family, kind, precision, rows=rows, checkpointing=True)
    assert 1 - WITHIN <= sum(formulas.values()) / sum(dry.values()) <= 1 + ABOVE


def test_a_model_of_equal_layers_needs_no_less() -> None:
    """What a pipeline and streamed layers are planned for: the largest kind of layer in the place of each."""
    shape = from_config({"model_type": "qwen3_5_text", **SIZES, "num_hidden_layers": 8})
    assert shape is not None and shape.delta is not None and shape.equal is not None
    assert (shape.delta.layers, shape.equal.delta and shape.equal.delta.layers, shape.attention_layers, shape.equal.attention_layers) == (
        6,
        8,
        2,
        0,
    )
    asked = Train(global_batch=8, steps=1, learning_rate=1.0, seq_len=LENGTH)
    for kind in ("lora", "qlora", "full"):
        of = [
            {item.name: item.size_bytes for item in rank_memory.estimate(one, Method(kind=kind), asked, RankSetup("bf16", "cuda", 2))}
            for one in (shape, shape.equal)
        ]
        lower = {name for name in of[0] if of[1].get(name, 0) < of[0][name]} - {memory_items.LOGITS}
        assert lower == set()
    one = streamed_memory.layer_bytes(shape, Method(kind="lora"), "bf16")
    assert (
        one
        == 2 * (shape.equal.total - shape.equal.of_layers(7).total)
        == streamed_memory.layer_bytes(shape.equal, Method(kind="lora"), "bf16")
    )


def test_attention_that_is_larger_than_the_delta_rule_is_not_planned_as_equal() -> None:
    shape = from_config({"model_type": "qwen3_5_text", **SIZES, "head_dim": 256})
    assert shape is not None and shape.equal is None
    assert dataclasses.replace(shape, delta=None).equal is not None


def test_wide_layers_in_a_row_are_counted_as_they_are() -> None:
    """Ten of sixty layers attend to all tokens: a cut of six has one of them, one of seven may have two."""
    shape = known("google/gemma-4-31B-it")
    assert shape is not None and shape.wide is not None and shape.equal is not None
    found = [shape.of_layers(count).wide for count in (1, 6, 7, 13, 60)]
    assert [len(wide.places) for wide in found if wide is not None] == [1, 1, 2, 3, 10]
    assert shape.of_layers(60).total == shape.total and 1.08 < shape.equal.total / shape.total < 1.1
