"""Model folders as people have them that cannot be trained, or only in one way: made from the tiny Llama and from tiny models of other kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_HALF = (("layers", 1), ("ffn_dim", 64), ("attention_heads", 4))
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "hqq": {"quant_method": "hqq"},
    "a method of next year": {"quant_method": "qtip3", "bits": 2},
}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {  # name: (model_type, settings, class)
    "bert": ("bert", _SIZES, "BertForMaskedLM"),
    "roberta": ("roberta", _SIZES, "RobertaForMaskedLM"),
    "modernbert": ("modernbert", {**_SIZES, "pad_token_id": 0}, "ModernBertForMaskedLM"),
    "t5": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, "T5ForConditionalGeneration"),
    "bart": ("bart", {"d_model": 32, **{f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in _HALF}}, "BartForConditionalGeneration"),
    "a reward model": ("llama", {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}, "LlamaForSequenceClassification"),
    "a model for embeddings": ("llama", {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}, "LlamaModel"),
    "xlnet": ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, "XLNetLMHeadModel"),
}  # fmt: skip


def changed(model: Path, folder: Path, **edits: Any) -> Path:
    """A copy of the tiny model with other keys in config.json; None takes a key away."""
    shutil.copytree(model, folder)
    config = {key: value for key, value in {**json.loads((folder / "config.json").read_text()), **edits}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def other(model: Path, folder: Path, name: str) -> Path:
    """One of OTHERS, with the tiny model's tokenizer."""
    kind, settings, built = OTHERS[name]
    config = transformers.AutoConfig.for_model(kind, vocab_size=json.loads((model / "config.json").read_text())["vocab_size"], **settings)
    getattr(transformers, built)(config).save_pretrained(folder)
    for file in FILES:
        if (model / file).is_file() and not (folder / file).exists():
            shutil.copy(model / file, folder)
    return folder


def without_model(model: Path, folder: Path, files: dict[str, str]) -> Path:
    """The tiny model's tokenizer and these files, without a model."""
    folder.mkdir()
    for file in FILES:
        if (model / file).is_file():
            shutil.copy(model / file, folder)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def replacing(model: Path, folder: Path, without: str, names: Sequence[str]) -> Path:
    """A copy of the tiny model, empty files of these names in the place of one of its own."""
    shutil.copytree(model, folder)
    (folder / without).unlink()
    for name in names:
        (folder / name).touch()
    return folder


def in_parts(model: Path, folder: Path, *, missing: str) -> Path:
    """A copy of the tiny model in files of 50 kB, without those whose name begins so."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="50KB")
    for file in folder.glob(f"{missing}*"):
        file.unlink()
    return folder


def with_tokenizer(model: Path, folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the tiny model with another tokenizer.json."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def quantised(model: Path, folder: Path, bits: int) -> Path:
    """The tiny model in bitsandbytes' 4 or 8 bits."""
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    how = transformers.BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=how, device_map={"": "cpu"})
    loaded.save_pretrained(folder)
    for file in FILES:
        if (model / file).is_file():
            shutil.copy(model / file, folder)
    return folder


def in_eight_float_bits(model: Path, folder: Path) -> tuple[Path, Path]:
    """The tiny model's matrices in FP8 with one scale each, and the plain model of the same rounded values."""
    from safetensors.torch import load_file, save_file

    plain, narrow = shutil.copytree(model, folder / "plain"), shutil.copytree(model, folder / "fp8")
    stored, values = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        stored[name] = values[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1).float()
            values[name] = stored[name].float() * scale
    save_file(stored, narrow / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((narrow / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (narrow / "config.json").write_text(json.dumps(config))
    return narrow, plain


def in_four_float_bits(model: Path, folder: Path, *, layers: int = 3) -> tuple[Path, Path]:
    """A tiny gpt-oss with its experts in MXFP4, and the plain model of the same numbers, as transformers reads them. Both have this model's tokenizer."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = folder / "mxfp4", folder / "plain"
    tokenizer, draw = transformers.AutoTokenizer.from_pretrained(model), torch.Generator().manual_seed(1)
    config = transformers.AutoConfig.for_model(
        "gpt_oss", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512, sliding_window=24, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    shutil.copytree(plain, stored)
    files, values = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        files[name] = values[name] = weight
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width_in, width_out = weight.shape
            blocks = torch.randint(0, 256, (experts, width_out, width_in // 32, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(119, 123, blocks.shape[:3], dtype=torch.uint8, generator=draw)
            del files[name]
            files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        elif name.endswith("_bias"):
            files[name] = values[name] = torch.randn(weight.shape, generator=draw) / 10
    save_file(files, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = json.loads((plain / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    (stored / "config.json").write_text(json.dumps(settings))
    return stored, plain
