"""Counts from the config alone against transformers and peft, module by module, on the meta device."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.model.adapters import WITH_EXPERTS, adapter_matrices, computed_parameters, counted, lora_parameters
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.families import from_config, known
from homelab.shared.recipe import Method


def shape(name: str) -> Architecture:
    architecture = known(name)
    assert architecture is not None
    return architecture


def test_adapters() -> None:
    assert lora_parameters(shape("meta-llama/Llama-2-7b-hf"), 16, ("q_proj", "v_proj")) == 8_388_608
    assert lora_parameters(shape("meta-llama/Llama-3.1-8B"), 16) == 41_943_040
    assert lora_parameters(shape("HuggingFaceTB/SmolLM2-135M"), 16) == 4_884_480
    assert lora_parameters(shape("HuggingFaceTB/SmolLM2-135M"), 16, ("self_attn.q_proj",)) == 16 * 30 * (576 + 576)


def test_an_unknown_target_is_the_users_fault() -> None:
    with pytest.raises(InputError) as caught:
        lora_parameters(shape("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), 16, ("q_proj", "v_porj"))
    assert 'Did you mean "v_proj"' in caught.value.message and "targets" in caught.value.where
    assert "up_proj" in caught.value.hint


def test_unknown_models_and_broken_configs_are_none() -> None:
    assert from_config({"model_type": "mamba", "hidden_size": 8}) is None
    assert from_config({}) is None
    good = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    good |= {"intermediate_size": 16, "vocab_size": 32}
    assert from_config(good) is not None
    for key in good:
        assert from_config({other: value for other, value in good.items() if other != key}) is None
        assert from_config({**good, key: None}) is None


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}


_FEW: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
}
_OTHERS: dict[str, Any] = {"num_experts": 6, "shared_expert_intermediate_size": 40, **_FEW, **_DELTA}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4: dict[str, Any] = {"hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 7}
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 6, "head_dim": 32, **_FEW}),
    ("qwen3_moe", {"num_experts": 6, "attention_bias": True, "mlp_only_layers": [1], **_FEW}),
    ("qwen3_moe", {"num_experts": 6, "decoder_sparse_step": 2, **_FEW}),
    ("mixtral", {"num_local_experts": 4}),
    ("mixtral", {"num_local_experts": 4, "head_dim": 32, "tie_word_embeddings": True}),
    ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "attention_bias": True}),
    ("gpt_oss", {"num_local_experts": 4}),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 16, "attention_bias": False}),
    ("deepseek_v3", {**_FEW, **_LATENT}),
    ("deepseek_v3", {**_FEW, **_LATENT, "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0}),
    ("deepseek_v2", {**_FEW, **_LATENT, "mlp_bias": True}),
    ("deepseek_v2", {**_FEW, **_LATENT, "q_lora_rank": None, "first_k_dense_replace": 2}),
    ("qwen3_next", {**_OTHERS, "full_attention_interval": 2}),
    ("qwen3_next", {**_OTHERS, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mlp_only_layers": [1]}),
    ("qwen3_5_moe_text", {**_OTHERS, "num_hidden_layers": 8}),
    ("gemma4_text", {**_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}),
    ("qwen3_5_moe", {"text_config": {**_OTHERS, "attention_bias": True, "full_attention_interval": 3}}),
]


def sized(extra: dict[str, Any]) -> dict[str, Any]:
    """Of a model with a part for images the sizes are those of its text."""
    return {**extra, "text_config": {**SMALL, **extra["text_config"]}} if "text_config" in extra else {**SMALL, **extra}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 16}),
        ("smollm3", {}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("olmo2", {"attention_bias": True, "head_dim": 16}),
        ("olmo3", {}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("gemma3", {"text_config": {"head_dim": 16}, "vision_config": _SIGHT, "mm_tokens_per_image": 1}),
        ("gemma3", {"text_config": {}, "vision_config": {**_SIGHT, "vision_use_head": False, "num_channels": 1}, "mm_tokens_per_image": 1}),
        (
            "gemma4",
            {"text_config": _GEMMA4, "vision_config": {**_SIGHT, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 16}},
        ),
        ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        (
            "gemma4_text",
            {
                **_GEMMA4,
                "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 4, "full_attention"],
                "tie_word_embeddings": False,
            },
        ),
        ("qwen3_5_text", {**_DELTA, "num_hidden_layers": 5}),
        ("qwen3_5_text", {**_DELTA, "layer_types": ["full_attention", "linear_attention", "full_attention"], "tie_word_embeddings": True}),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "num_hidden_layers": 4}),
        ("qwen3_5", {"text_config": {**_DELTA, "num_hidden_layers": 4, "tie_word_embeddings": True}}),
        ("qwen3_5", {"text_config": {**_DELTA, "num_hidden_layers": 4}, "tie_word_embeddings": True}),
        *MIXTURES,
    ],
)
@pytest.mark.parametrize("written", ["whole", "as-saved"])
def test_counts_are_those_of_transformers_and_peft(kind: str, extra: dict[str, Any], written: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from homelab.worker.model import adapter_targets, inspection

    config = transformers.AutoConfig.for_model(kind, **sized(extra))
    architecture = from_config(config.to_dict() if written == "whole" else config.to_diff_dict())
    assert architecture is not None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert architecture.total == sum(parameter.numel() for parameter in model.parameters())
    outside = tuple(f"{name}." for name in inspection.outside_language(model))
    of_text = [(name, part) for name, part in model.named_parameters() if not name.startswith(outside)]
    assert architecture.outside == architecture.total - sum(part.numel() for _, part in of_text)
    blocks = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and not name.startswith(outside)
    }
    blocks.pop("lm_head", None)
    blocks = {name: module for name, module in blocks.items() if not name.endswith("router.proj")}  # Gemma 4's router is one
    gates = [blocks.pop(name).weight for name in list(blocks) if name.endswith("shared_expert_gate")]  # they count with the routers
    assert architecture.linear_parameters == sum(module.weight.numel() for module in blocks.values())
    assert {name.rsplit(".", 1)[-1] for name in blocks} == {linear.name for linear, _ in architecture.linears}
    experts = {name: part for name, part in model.named_parameters() if ".experts." in name}
    assert architecture.expert_parameters == sum(part.numel() for part in experts.values() if part.dim() == 3)
    routers = [
        part for name, part in model.named_parameters() if name.endswith(("mlp.gate.weight", "mlp.router.weight", "router.proj.weight"))
    ]
    assert architecture.router_parameters == sum(part.numel() for part in (*routers, *gates))
    attending = next(number for number in range(8) if any(f"layers.{number}.self_attn" in name for name, _ in of_text))
    assert sorted(architecture.query_key_norms) == sorted(
        part.numel() for name, part in of_text if f"layers.{attending}.self_attn" in name and "norm" in name
    )
    small = Counter({part.numel(): 0 for part in model.parameters()})
    small.update(part.numel() for name, part in of_text if part.dim() != 2 and not name.endswith(".bias") and ".experts" not in name)
    counted_small = Counter[int]({architecture.hidden: 1 + architecture.norms_per_layer * architecture.layers})
    for size, count in architecture.small_tensors:
        counted_small[size] += count
    assert +counted_small == +small
    some = ("o_proj",) if experts else ("o_proj", "down_proj")
    for targets in ("all-linear", some):
        modules = (
            [name for name in adapter_targets.all_linear(model) if not name.startswith(outside)]
            if targets == "all-linear"
            else list(targets)
        )
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(config)
            with adapter_targets.as_written():
                sees = "|".join(map(re.escape, outside))
                settings = peft.LoraConfig(
                    r=4, target_modules=modules, exclude_modules=rf"({sees}).*" if sees else None, task_type="CAUSAL_LM"
                )
                adapted = peft.get_peft_model(base, settings)
        trainable = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        assert lora_parameters(architecture, 4, targets) == trainable


@pytest.mark.timeout(120)
def test_a_real_size_on_the_meta_device() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert from_config(config.to_dict()) == shape("meta-llama/Llama-2-7b-hf")
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "extra"), [case for case in MIXTURES if case[0] != "gpt_oss"])
def test_adapters_on_experts_are_those_of_peft(kind: str, extra: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from homelab.worker.model import adapter_targets

    config = transformers.AutoConfig.for_model(kind, **sized(extra))
    architecture = from_config(config.to_dict())
    assert architecture is not None and architecture.experts is not None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        matrices = [name for name, part in model.named_parameters() if ".experts." in name and part.dim() == 3]
        with adapter_targets.as_written():
            settings = peft.LoraConfig(
                r=4, target_modules=adapter_targets.all_linear(model), target_parameters=matrices, task_type="CAUSAL_LM"
            )
            adapted = peft.get_peft_model(model, settings)
    trained = [tuple(parameter.shape) for parameter in adapted.parameters() if parameter.requires_grad]
    assert lora_parameters(architecture, 4, WITH_EXPERTS) == sum(math.prod(shape) for shape in trained)
    shapes = Counter[tuple[int, int]]()
    for rows, columns, count in adapter_matrices(architecture, 4, WITH_EXPERTS):
        shapes[rows, columns] += count
    assert shapes == Counter(trained)
    computed = computed_parameters(architecture, 4, WITH_EXPERTS) - lora_parameters(architecture, 4)
    of_experts = lora_parameters(architecture, 4, WITH_EXPERTS) - lora_parameters(architecture, 4)
    assert computed == of_experts * architecture.experts.per_token // architecture.experts.count


@pytest.mark.parametrize(
    ("name", "reason"), [("Qwen/Qwen3-4B", "no routed experts"), ("openai/gpt-oss-20b", "experts in a form that takes no adapters")]
)
def test_adapters_on_experts_need_experts(name: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        lora_parameters(shape(name), 16, WITH_EXPERTS)
    assert reason in caught.value.message and caught.value.hint == 'targets = "all-linear"'


def test_a_list_that_names_experts_is_not_counted() -> None:
    mixture, plain = shape("Qwen/Qwen3-30B-A3B"), shape("Qwen/Qwen3-4B")

    def with_targets(*targets: Any) -> Method:
        return Method(kind="lora", targets=targets if len(targets) != 1 or "-" not in targets[0] else targets[0])

    assert counted(mixture, with_targets("q_proj", "gate_proj")) is None and counted(mixture, with_targets("mlp.gate")) is None
    assert all(counted(mixture, with_targets(targets)) is mixture for targets in ("q_proj", "all-linear", WITH_EXPERTS))
    assert counted(plain, with_targets("q_proj", "gate_proj")) is plain and counted(None, with_targets("all-linear")) is None
    assert lora_parameters(mixture, 16) == 13_369_344 and lora_parameters(mixture, 16, WITH_EXPERTS) == 642_514_944


def test_all_weights_of_a_model_that_sees_are_not_counted() -> None:
    seeing = shape("google/gemma-3-4b-it")
    assert counted(seeing, Method(kind="full")) is None and counted(seeing, Method(kind="lora")) is seeing
    assert counted(shape("Qwen/Qwen3.5-4B"), Method(kind="full")) is not None, "only its language part is built"
