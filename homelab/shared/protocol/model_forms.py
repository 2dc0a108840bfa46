"""The files of a base model as transformers reads it, and what a folder or a repository holds in its place. One table for node, worker and checks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from homelab.shared.protocol import files

if TYPE_CHECKING:
    from collections.abc import Collection

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")

# Keys of config.json that say how the file came to be, not what the model is.
HISTORY = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})

ADAPTERS = "adapters"
GGUF = "gguf"
ORIGINAL = "original"
ONNX = "onnx"
FRAMEWORK = "framework"
DIFFUSION = "diffusion"
SENTENCES = "sentences"
_SAME = "[model] name = the same model in the form of transformers (config.json and *.safetensors; its name often ends in -hf)"
_DECODER = "[model] name = a causal language model, which predicts the next word (Qwen/Qwen3-0.6B is one)"
# Kind -> (what it is, after "it" or a name; the edit of the recipe, "" where that needs more than the names of the files).
HELD = {
    ADAPTERS: ("holds adapters (adapter_config.json), which are not a model alone", ""),
    GGUF: ("holds GGUF files, which can be used with llama.cpp but not trained", ""),
    ORIGINAL: ("holds a model in its maker's own form (params.json, consolidated.*), which transformers does not read", _SAME),
    ONNX: ("holds a model for ONNX or OpenVINO only, which cannot be trained", _SAME),
    FRAMEWORK: ("holds weights for TensorFlow or Flax only (tf_model.h5, flax_model.msgpack), which transformers no longer reads", _SAME),
    DIFFUSION: ("holds a model of diffusers (model_index.json, diffusion_pytorch_model.*), which does not write text", _DECODER),
    SENTENCES: ("holds a model of sentence-transformers (modules.json), which compares texts but writes none", _DECODER),
}  # fmt: skip


def instead(names: Collection[str]) -> str:
    """What files with these names are in the place of a base model, a key of HELD; "" where they may be one."""
    if "adapter_config.json" in names:
        return ADAPTERS
    if any(name in names for name in WEIGHTS):
        return SENTENCES if "modules.json" in names and "config.json" not in names else ""
    if "model_index.json" in names or any(name.startswith("diffusion_pytorch_model") for name in names):
        return DIFFUSION
    if any(name.endswith(".gguf") for name in names):
        return GGUF
    if any(name.startswith("consolidated.") for name in names) or ("params.json" in names and "config.json" not in names):
        return ORIGINAL
    if any(name.endswith((".onnx", ".onnx_data", "openvino_model.xml")) or name == "onnx" for name in names):
        return ONNX
    if any(name.startswith(("tf_model", "flax_model")) for name in names):
        return FRAMEWORK
    return SENTENCES if "modules.json" in names and "config.json" not in names else ""


def weights(folder: str, names: Collection[str]) -> list[str]:
    """The files that transformers loads the weights from: safetensors before .bin, one file before several (modeling_utils.py). [] where there are none."""
    for one, index in (WEIGHTS[:2], WEIGHTS[2:]):
        if one in names:
            return [one]
        if index in names:
            content = files.read_json(os.path.join(folder, index))
            parts = content.get("weight_map") if isinstance(content, dict) else None
            values = parts.values() if isinstance(parts, dict) else ()
            return sorted({name for name in values if isinstance(name, str) and "/" not in name})
    return []


def lacking(folder: str, names: Collection[str]) -> str:
    """What the weights of this folder lack, after "it has"; "" where each file is there."""
    if not any(name in names for name in WEIGHTS):
        return f"no weights ({' or '.join(WEIGHTS[:2])})"
    missing = [name for name in weights(folder, names) if name not in names]
    return f"no {missing[0][:200]}, which the index of its weights names" if missing else ""
