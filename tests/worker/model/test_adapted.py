"""The table of what can be trained is walked with tiny random models: every kind is merged right, read from the disk, or refused before it is trained."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.shared.law import usable
from homelab.shared.law.usable import (
    EMBEDDING,
    EXPERTS,
    FIXED_HEAD,
    HEAD,
    LINEAR,
    MATRIX,
    OWN_EMBEDDING,
    OWN_LINEAR,
    SHARED,
    TIED_EMBEDDING,
    TIED_HEAD,
    TRANSPOSED,
)
from homelab.shared.protocol import quantisation
from homelab.shared.recipe import Method
from homelab.worker.checkpoints import saving, weights
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapted, stored_weights
from homelab.worker.model.build import add_adapters
from homelab.worker.tools import adapter_delta
from tests.shared.law.test_usable import CELLS, METHODS, QUANTISED
from tests.worker.model.test_adapter_targets import FAMILIES

PLAIN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {
    **PLAIN,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
ZAMBA = {
    **PLAIN,
    "num_hidden_layers": 8,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "n_mamba_heads": 2,
    "mamba_d_state": 4,
    "num_key_value_heads": 4,
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "decoder_layers": 1,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}
TIED, APART = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**PLAIN, **APART}),
    "llama tied": ("llama", {**PLAIN, **TIED}),
    "qwen2 tied": ("qwen2", {**PLAIN, **TIED}),
    "qwen3": ("qwen3", {**MIXED, **APART}),
    "gemma": ("gemma", {**PLAIN, "head_dim": 8}),
    "gemma2": ("gemma2", {**PLAIN, "head_dim": 8}),
    "gemma3 sees": ("gemma3", {"text_config": {**PLAIN, "head_dim": 8}, "vision_config": SIGHT}),
    "gpt2": ("gpt2", GPT2),
    "phi": ("phi", PLAIN),
    "phi3": ("phi3", PLAIN),
    "cohere": ("cohere", PLAIN),
    "granite": ("granite", {**PLAIN, **TIED}),
    "bloom": ("bloom", {**PLAIN, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}),
    "opt": ("opt", {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("mixtral", MIXED),
    "qwen3_moe": ("qwen3_moe", MIXED),
    "phimoe": ("phimoe", MIXED),
    "gpt_oss": ("gpt_oss", MIXED),
    "laguna": ("laguna", {**MIXED, "mlp_only_layers": [0], "shared_expert_intermediate_size": 24}),
    "jetmoe": ("jetmoe", {**PLAIN, "kv_channels": 8}),
    "llama4": ("llama4_text", {**MIXED, "intermediate_size_mlp": 48}),
    **{name: (name, FAMILIES[name][0]) for name in ("deepseek_v3", "qwen3_next", "granitemoe", "olmoe") if name in FAMILIES},
    "bart": ("bart", BART),
    "zamba": ("zamba", ZAMBA),
}
ALL = "all-linear"
TRAINED = [
    ("llama", ALL, {LINEAR}),
    ("llama", "q_proj,lm_head", {LINEAR, HEAD}),
    ("llama", "embed_tokens", {EMBEDDING}),
    ("llama", "embed_tokens,lm_head", {EMBEDDING, HEAD}),
    ("llama tied", "q_proj,lm_head", {LINEAR, TIED_HEAD}),
    ("llama tied", "embed_tokens", {TIED_EMBEDDING}),
    ("llama tied", "embed_tokens,lm_head", {TIED_EMBEDDING, TIED_HEAD}),
    ("qwen2 tied", "down_proj,lm_head", {LINEAR, TIED_HEAD}),
    ("qwen3", "lm_head", {HEAD}),
    ("gemma", "embed_tokens,lm_head", {TIED_EMBEDDING, TIED_HEAD}),
    ("gemma2", "lm_head", {TIED_HEAD}),
    ("gemma3 sees", "q_proj,lm_head", {LINEAR, TIED_HEAD}),
    ("gpt2", ALL, {TRANSPOSED}),
    ("gpt2", "c_attn,lm_head", {TRANSPOSED, TIED_HEAD}),
    ("gpt2", "wte,wpe", {TIED_EMBEDDING, EMBEDDING}),
    ("phi", ALL, {LINEAR}),
    ("phi", "lm_head,embed_tokens", {HEAD, EMBEDDING}),
    ("phi3", "qkv_proj,gate_up_proj", {LINEAR}),
    ("cohere", "lm_head", {TIED_HEAD}),
    ("granite", "embed_tokens", {TIED_EMBEDDING}),
    ("bloom", "word_embeddings,lm_head", {TIED_EMBEDDING, TIED_HEAD}),
    ("falcon", "dense,lm_head", {LINEAR, TIED_HEAD}),
    ("opt", "fc1,embed_tokens", {LINEAR, TIED_EMBEDDING}),
    ("mixtral", "w1,w2,w3", {EXPERTS}),
    ("mixtral", "gate", {MATRIX}),
    ("mixtral", "gate,q_proj,w1,w2,w3,lm_head", {MATRIX, LINEAR, EXPERTS, HEAD}),
    ("qwen3_moe", "gate_proj,up_proj,down_proj", {EXPERTS}),
    ("gpt_oss", "q_proj", {LINEAR}),
    ("jetmoe", "lm_head", {TIED_HEAD}),
    ("laguna", "gate_proj,up_proj,down_proj", {LINEAR}),
    ("deepseek_v3", ALL, {LINEAR}),
    ("deepseek_v3", "gate_proj,up_proj,down_proj", {EXPERTS}),
    ("qwen3_next", ALL, {LINEAR}),
    ("qwen3_next", "q_proj,gate_proj,up_proj,down_proj,lm_head", {LINEAR, EXPERTS, HEAD}),
    ("granitemoe", ALL, {LINEAR}),
    ("olmoe", ALL, {LINEAR}),
]
REFUSED = [
    ("zamba", "q_proj,in_proj", SHARED),
    ("zamba", "lm_head", FIXED_HEAD),
    ("phimoe", "router,q_proj", OWN_LINEAR),
    ("llama4", "router,o_proj", OWN_LINEAR),
    ("bart", "embed_positions,q_proj", OWN_EMBEDDING),
]
TOKENS = torch.arange(3, 23).view(1, -1)


def base(kind: str, folder: Path) -> Path:
    """The folder of a tiny random model whose layers all matter."""
    name, config = CONFIGS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def method(targets: str) -> Method:
    return Method("lora", rank=4, alpha=8, targets="all-linear" if targets == ALL else tuple(targets.split(",")))


@torch.no_grad()
def trained(folder: Path, targets: str) -> Any:
    """The model with adapters that do something."""
    model = add_adapters(loaded(folder), method(targets), 1)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Any:
    return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "targets", "parts"), TRAINED, ids=[f"{kind}: {targets}" for kind, targets, _ in TRAINED])
def test_what_is_trained_is_merged_and_read_again(tmp_path: Path, kind: str, targets: str, parts: set[str]) -> None:
    folder = base(kind, tmp_path / "base")
    model = trained(folder, targets)
    wanted, before = logits(model), logits(loaded(folder))
    assert {found for _, _, found in adapted.parts(model)} == parts and float((wanted - before).abs().max()) > 1e-2
    model.save_pretrained(tmp_path / "final", save_embedding_layers=False)  # as `write_final`
    again = weights.load_adapter(loaded(folder), tmp_path / "final").eval()
    assert torch.equal(logits(again), wanted)
    changes, plain = adapter_delta.changes(again), loaded(folder)
    assert list(adapter_delta.put_into(plain, changes, dequantised=False)) == list(range(1, len(changes) + 1))
    saving.save_whole(plain, tmp_path / "merged")
    assert torch.allclose(logits(loaded(tmp_path / "merged")), wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())))
    is_untied = any(usable.PARTS[part].merge == usable.UNTIED for part in parts)
    assert adapted.unties(model) == is_untied == bool(adapted.notes(model))
    if is_untied:
        config = json.loads((tmp_path / "merged/config.json").read_text())
        assert config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")) is False


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "targets", "part"), REFUSED, ids=[f"{kind}: {targets}" for kind, targets, _ in REFUSED])
def test_what_cannot_be_merged_is_refused_with_targets_that_can(tmp_path: Path, kind: str, targets: str, part: str) -> None:
    folder = base(kind, tmp_path / "base")
    with pytest.raises(WorkerError) as refused:
        add_adapters(loaded(folder), method(targets), 1)
    assert part in refused.value.message and usable.PARTS[part].why_not in refused.value.message and refused.value.needs_launch
    named = re.findall(r'"(\w+)"', refused.value.hint)
    if named != ["full"]:
        add_adapters(loaded(folder), method(",".join(named)), 1)  # the fix


def test_every_kind_of_the_table_was_walked() -> None:
    seen = set().union(*(parts for _, _, parts in TRAINED)) | {part for _, _, part in REFUSED}
    # PEFT itself refuses convolutions of the Mamba family; no causal language model has the other two below its decoder.
    assert set(usable.PARTS) - seen == {usable.CONVOLUTION, usable.ATTENTION, usable.UNKNOWN}
    for kind in set(usable.PARTS) - seen:
        assert usable.PARTS[kind].merge is None


def test_layers_that_are_trained_whole_beside_adapters_are_refused(tmp_path: Path) -> None:
    """As Unsloth makes it of a head in the targets."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(loaded(base("llama", tmp_path / "base")), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(WorkerError, match="lm_head would be trained completely") as refused:
        adapted.refuse_unmergeable(model)
    assert 'backend = "transformers"' in refused.value.hint


def test_a_whole_model_does_not_say_that_it_is_quantised(tmp_path: Path) -> None:
    model = loaded(base("llama", tmp_path / "base"))
    model.config.quantization_config = {"quant_method": "fp8"}
    saving.forget_quantisation(model)
    saving.save_whole(model, tmp_path / "final")
    assert "quantization_config" not in json.loads((tmp_path / "final/config.json").read_text())


@pytest.mark.parametrize(("form", "method"), CELLS)
def test_a_rank_refuses_what_the_table_refuses(form: str, method: str) -> None:
    kind, base = cast(Any, METHODS[method])
    refuses = usable.CHECKPOINTS[form, method].refusal is not None
    with pytest.raises(WorkerError, match="quantised") if refuses else contextlib.nullcontext():
        stored_weights.refuse(quantisation.stored_of(QUANTISED[form]), Method(kind, base=base), "org/name")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_meta_device_tells_the_same(tmp_path: Path, device: str) -> None:
    name, config = CONFIGS["zamba"]
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config))
    with pytest.raises(WorkerError, match="a weight of several layers"):
        add_adapters(model, method("q_proj"), 1)


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "top_p": 0.9}, {"top_k": 5, "do_sample": False}, {"num_return_sequences": 4}])
def test_settings_that_transformers_refuses_to_write_do_not_lose_the_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = loaded(base("llama", tmp_path / "base"))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match="Fix these issues"):
        model.save_pretrained(tmp_path / "as transformers does")
    saving.save_whole(model, tmp_path / "merged")
    assert torch.equal(logits(loaded(tmp_path / "merged")), logits(model))
