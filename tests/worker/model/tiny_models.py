"""Tiny models of many families, by their config.json alone: random weights, 2 layers, a vocabulary of 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PLAIN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_NO_GROUPS = {key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "cohere": {**_PLAIN, "logit_scale": 0.0625},
    "granite": {**_PLAIN, "logits_scaling": 8.0},
    "gemma2": {**_PLAIN, "head_dim": 16, "final_logit_softcapping": 30.0},
    "gpt2": {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.05,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "phi": {**_PLAIN, "resid_pdrop": 0.1, "attention_dropout": 0.1, "embd_pdrop": 0.05},
    "starcoder2": {**_PLAIN, "residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "falcon": {**_NO_GROUPS, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "opt": {**_NO_GROUPS, "ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.3},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {**_NO_GROUPS, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "mixtral": {**_PLAIN, "num_local_experts": 4, "router_jitter_noise": 0.1},
    "phimoe": {**_PLAIN, "num_local_experts": 4, "router_jitter_noise": 0.01},
    "gemma3": {"text_config": {**_PLAIN, "head_dim": 16}, "vision_config": {**SIGHT, "attention_dropout": 0.1}},
}  # fmt: skip
# What is no weight decides here, too: the scale of a layer, the biases of a router.
WITH_BUFFERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_PLAIN, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "gemma4_text": {
        **_PLAIN, "hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2_moe": {
        **_PLAIN, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1, "use_expert_bias": True,
        "layer_types": ["conv", "full_attention"],
    },
}  # fmt: skip
DRAWING = tuple(kind for kind, config in CONFIGS.items() if any(word in key for key in config for word in ("drop", "jitter")))


def build(kind: str, device: str = "cpu", *, adapters: str | list[str] | None = None, **changes: Any) -> Any:
    """The causal LM of this kind with random weights; `adapters`: LoRA of rank 2 on these targets."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    if adapters is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=adapters))


def folder(kind: str, place: Path, tokenizer: Any, **changes: Any) -> Path:
    """The same as files, with this tokenizer and a vocabulary of its size."""
    size = {"vocab_size": len(tokenizer)}
    if "text_config" in CONFIGS[kind]:
        changes["text_config"] = {**CONFIGS[kind]["text_config"], **size, "max_position_embeddings": 512}
    else:
        changes |= {**size, "n_positions" if kind == "gpt2" else "max_position_embeddings": 512}
    build(kind, **changes).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def folder_with_buffers(kind: str, place: Path, tokenizer: Any, **changes: Any) -> Path:
    """A model of `WITH_BUFFERS` as files, with this tokenizer; none of its buffers has the number with which the class begins."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**WITH_BUFFERS[kind], **sizes, **changes}))
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.copy_(0.3 + torch.rand(buffer.shape))
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
