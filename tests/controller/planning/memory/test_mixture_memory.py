"""The memory of mixtures of experts: the formulas against dry runs of small ones, whose own bytes are those of a real step (tests/worker/tools/test_dryrun.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model import known_models
from homelab.controller.planning.model.adapters import WITH_EXPERTS
from homelab.controller.planning.model.families import from_config, known
from homelab.shared.protocol import memory_items, quantisation
from homelab.shared.recipe import Method, Train
from homelab.worker.tools import memory_dry_run
from homelab.worker.tools.memory_dry_run import Situation

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}  # fmt: skip
_FEW: dict[str, Any] = {"num_experts_per_tok": 3}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64, "n_shared_experts": 1, **_FEW,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 32, **_FEW},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, **_FEW},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 32, **_FEW},
    "gpt_oss in MXFP4": {"num_local_experts": 8, "head_dim": 32, "quantization_config": {"quant_method": "mxfp4"}, **_FEW},
    "deepseek_v2": {"q_lora_rank": None, **_LATENT},
    "deepseek_v3": {"q_lora_rank": 48, **_LATENT},
}
WITHIN = 0.05
# With a vocabulary of 64 the layers are all that counts, and the formulas are an upper bound for DeepSeek's.
ABOVE_ALONE = 0.08
ABOVE_ALONE_IN_MXFP4 = 0.2  # the matrices that are made of 4 bits are gone when most is needed
LENGTH = 320


def compared(
    family: str,
    kind: Any,
    precision: str,
    *,
    rows: int = 1,
    checkpointing: bool = False,
    vocabulary: int = 3000,
    targets: Any = "all-linear",
) -> tuple[dict[str, int], dict[str, int]]:
    """(by formulas, by a dry run): the items of a card."""
    config = {**SIZES, **FAMILIES[family], "vocab_size": vocabulary, "model_type": family.partition(" ")[0]}
    method = {"kind": kind, "base": "auto", "rank": 8, "alpha": 16, "dropout": 0.0, "targets": targets, "backend": "auto"}
    train = {"seq_len": LENGTH, "gradient_checkpointing": checkpointing, "fused_loss": True, "optimizer": "adamw", "seed": 1}
    dry = memory_dry_run.dry_run(config, method, train, Situation("cuda", precision, micro_batch=rows, masked=rows > 1))
    shape = from_config(config)
    assert shape is not None
    asked = Train(global_batch=8, steps=1, learning_rate=1.0, seq_len=LENGTH, gradient_checkpointing=checkpointing, fused_loss=True)
    items = rank_memory.estimate(shape, Method(kind=kind, rank=8, targets=targets), asked, RankSetup(precision, "cuda", rows))
    return {item.name: item.size_bytes for item in items if item.name in rank_memory.SEEN_BY_A_DRY_RUN}, dry["items"]


CASES = [("qwen3_moe", "bf16", 1, False), ("deepseek_v2", "bf16", 1, True), ("gpt_oss in MXFP4", "bf16", 1, False)]
MORE = [
    (family, precision, rows, checkpointing)
    for family in FAMILIES for precision in ("bf16", "fp32") for rows in (1, 3) for checkpointing in (False, True)
    if (family, precision, rows, checkpointing) not in CASES
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "precision", "rows", "checkpointing"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)]
)
def test_the_formulas_are_within_five_percent_of_a_dry_run(family: str, precision: str, rows: int, checkpointing: bool) -> None:
    formulas, dry = compared(family, "lora", precision, rows=rows, checkpointing=checkpointing)
    assert formulas[memory_items.BASE_WEIGHTS] == pytest.approx(dry[memory_items.BASE_WEIGHTS], rel=0.005)
    assert formulas[memory_items.ADAPTERS] == dry[memory_items.ADAPTERS]
    assert sum(formulas.values()) == pytest.approx(sum(dry.values()), rel=WITHIN)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["mixtral", *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name != "mixtral")])
def test_layers_alone_are_not_counted_too_low(family: str) -> None:
    formulas, dry = compared(family, "lora", "bf16", checkpointing=True, vocabulary=64)
    assert 1 - WITHIN <= sum(formulas.values()) / sum(dry.values()) <= 1 + (ABOVE_ALONE_IN_MXFP4 if "MXFP4" in family else ABOVE_ALONE)


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "targets"), [("qlora", "all-linear"), ("qlora", WITH_EXPERTS), ("lora", WITH_EXPERTS)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2"])
def test_layers_alone_with_such_experts_are_not_counted_too_low(family: str, kind: str, targets: str) -> None:
    """The matrices of 4 bits are gone when most is needed, and they are counted: in models of this size they are a part that shows."""
    formulas, dry = compared(family, kind, "bf16", checkpointing=True, vocabulary=64, targets=targets)
    assert 1 - WITHIN <= sum(formulas.values()) / sum(dry.values()) <= 1 + ABOVE_ALONE + 0.02


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_trained_experts_are_counted_with_their_gradients(family: str) -> None:
    formulas, dry = compared(family, "full", "bf16")
    assert sum(formulas.values()) == pytest.approx(sum(dry.values()), rel=WITHIN)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "kind", "targets", "checkpointing"),
    [
        ("qwen3_moe", "qlora", "all-linear", False),
        pytest.param("mixtral", "qlora", "all-linear", True, marks=pytest.mark.thorough),
        pytest.param("deepseek_v2", "qlora", "all-linear", False, marks=pytest.mark.thorough),
        pytest.param("olmoe", "qlora", "all-linear", False, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", "lora", WITH_EXPERTS, False, marks=pytest.mark.thorough),
        pytest.param("mixtral", "qlora", WITH_EXPERTS, False, marks=pytest.mark.thorough),
    ],
)
def test_experts_in_4_bits_and_experts_with_adapters(family: str, kind: str, targets: str, checkpointing: bool) -> None:
    """Those in 4 bits, and those with adapters."""
    formulas, dry = compared(family, kind, "bf16", checkpointing=checkpointing, targets=targets)
    # In matrices that are so small, the scales of whole blocks are a part that shows.
    assert formulas[memory_items.BASE_WEIGHTS] == pytest.approx(dry[memory_items.BASE_WEIGHTS], rel=0.02)
    assert formulas[memory_items.ADAPTERS] == dry[memory_items.ADAPTERS]
    assert sum(formulas.values()) == pytest.approx(sum(dry.values()), rel=WITHIN)


def test_four_bits_reach_the_experts_but_not_router_embeddings_and_head() -> None:
    shape = known("Qwen/Qwen3-30B-A3B")
    assert shape is not None
    packed = shape.linear_parameters + shape.expert_parameters
    held = rank_memory.base_weight_bytes(shape, Method(kind="qlora"), "bf16")
    assert held == pytest.approx(quantisation.NF4_BYTES * packed + 2 * (shape.total - packed), rel=1e-6)
    assert 16.5e9 < held < 17.0e9
    assert rank_memory.base_weight_bytes(shape, Method(kind="lora"), "bf16") == 2 * shape.total
    in_8_bits = rank_memory.base_weight_bytes(shape, Method(kind="lora", base="8bit"), "bf16")
    assert in_8_bits > 2 * shape.expert_parameters, "8 bits are for linear layers alone"


@pytest.mark.parametrize(("model", "matrix", "experts"), [("Qwen/Qwen3-30B-A3B", 1, 21), ("mistralai/Mixtral-8x7B-v0.1", 0, 1)])
def test_the_matrices_that_are_made_at_once_are_counted(model: str, matrix: int, experts: int) -> None:
    """Small ones together, in 64 MiB; a large one alone."""
    shape = known(model)
    assert shape is not None and shape.experts is not None
    asked = Train(global_batch=8, steps=1, learning_rate=1.0, seq_len=512, gradient_checkpointing=True)
    items = rank_memory.estimate(shape, Method(kind="qlora", rank=8), asked, RankSetup("bf16", "cuda", 1))
    (found,) = [item.size_bytes for item in items if item.name == memory_items.DEQUANTISATION]
    assert found == experts * 2 * shape.experts.matrices(shape.hidden)[matrix].weights


def test_experts_of_gpt_oss_stay_as_their_files_have_them() -> None:
    """13.8 GB of files. Where all weights are trained, and in a copy with 16 bits, they are as wide as others."""
    shape, config = known("openai/gpt-oss-20b"), known_models.config_of("openai/gpt-oss-20b")
    assert shape is not None and config is not None and rank_memory.base_weight_bytes(shape, Method(kind="lora"), "bf16") == 13_761_264_768
    assert rank_memory.base_weight_bytes(shape, Method(kind="full"), "bf16") == 4 * shape.total
    assert rank_memory.base_weight_bytes(shape, Method(kind="lora", backend="unsloth"), "bf16") == 2 * shape.total
    copy = from_config({key: value for key, value in config.items() if key != "quantization_config"})
    assert copy is not None and rank_memory.base_weight_bytes(copy, Method(kind="qlora"), "bf16") > 2 * shape.expert_parameters
