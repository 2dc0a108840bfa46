"""The base model as it lies on this node: whole, its files' digests, its chat template; where it is not there, the way to the hub."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from homelab.node.storage import digests
from homelab.node.system import hub
from homelab.shared.protocol import files, hub_cache, model_forms

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

# Beside the weights, what decides how the model computes and how text becomes tokens. config.json is compared key by key.
_COMPARED = (
    *model_forms.TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
# The files that a tokenizer takes its chat template from.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_TEMPLATE_BYTES = 16 << 20
_HEADER_BYTES = 64 << 20  # a safetensors header describes tensors; the largest have a few MB
_POINTER = b"version https://git-lfs"


def read(request: JsonObject) -> JsonObject | None:
    """The model of the recipe, where one was asked for."""
    if not request.get("model"):
        return None
    return _model(request)


def _model(request: JsonObject) -> JsonObject:
    name, revision = request["model"], request.get("revision")
    if name.startswith(("/", "~")):
        return _model_folder(os.path.expanduser(name), request)
    folder = hub_cache.snapshot(name, revision)
    answer = {"found": False, "path": None, "config": None, "size_bytes": None, "problem": "not in the hub cache"}
    if folder is not None:
        answer = _model_folder(folder, request)
    if not answer["found"] and not answer.get("damaged"):
        # A token in the controller's environment is sent with the run.
        answer.update(has_token=bool(request.get("token_sent")) or hub.has_token(), hub=hub.way())
    return answer


def _model_folder(folder: str, request: JsonObject) -> JsonObject:
    answer = {"found": False, "path": folder, "config": None, "size_bytes": None, "problem": None}
    if not os.path.isdir(folder):
        answer["problem"] = "there is no such folder" if not os.path.exists(folder) else "this is not a folder"
        return answer
    names = os.listdir(folder)
    answer["config"] = files.read_json(os.path.join(folder, "config.json"))
    weights = model_forms.weights(folder, names)
    other = _instead(folder, names)
    if other:
        answer.update(other)
    elif answer["config"] is None:
        answer["problem"] = "config.json is missing or broken: this is not a model folder"
    elif not any(name in names for name in model_forms.WEIGHTS):
        answer["problem"] = f"it has {model_forms.lacking(folder, names)}"
    elif not any(name in names for name in model_forms.TOKENIZERS):
        answer["problem"] = f"it has no tokenizer ({' or '.join(model_forms.TOKENIZERS[:3])})"
    else:
        answer["found"] = True
    try:
        answer["size_bytes"] = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
        if answer["found"]:
            answer.update(_inside(folder, names, weights, request))
    except OSError as error:
        answer["found"], answer["problem"] = False, f"a file cannot be read: {error}"
    return answer


def _instead(folder: str, names: list[str]) -> JsonObject:
    """What the folder holds in the place of a base model; nothing where it may be one."""
    kind = model_forms.instead(names)
    if not kind:
        return {}
    answer = {"instead": kind, "problem": f"it {model_forms.HELD[kind][0]}"}
    if kind == model_forms.ADAPTERS:
        settings = files.read_json(os.path.join(folder, "adapter_config.json"))
        base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
        base = base[:200] if isinstance(base, str) else ""
        answer.update(base=base, problem=answer["problem"] + (f": they belong to {base}" if base else ""))
    return answer


def _inside(folder: str, names: list[str], weights: list[str], request: JsonObject) -> JsonObject:
    """The content checks of a folder that has every file it needs."""
    for name in weights:
        if name not in names:
            return {"found": False, "problem": f"it has {model_forms.lacking(folder, names)}"}
        fault = weights_fault(os.path.join(folder, name))
        if fault:
            return {"found": False, "damaged": True, "problem": f"{name} {fault}"}
    kept = digests.Kept(request["workdir"])
    file_digests = {
        name: kept.of(os.path.join(folder, name), deep=bool(request.get("deep")))
        for name in sorted(set(weights) | {name for name in names if name in _COMPARED or name.endswith(".index.json")})
        if os.path.isfile(os.path.join(folder, name))
    }
    kept.save()
    return {
        "files": file_digests,
        "has_chat_template": has_chat_template(folder, names),
        "template_writes_date": template_writes_date(folder, names),
    }


def weights_fault(path: str) -> str | None:
    """What is wrong with a file of weights as far as its first bytes and its size tell, or None."""
    size_bytes = os.path.getsize(path)
    with open(path, "rb") as stream:
        first = stream.read(len(_POINTER))
        if first == _POINTER:
            return "is a pointer of Git LFS, not the weights (git clone without git lfs)"
        length = int.from_bytes(first[:8], "little")
        if not path.endswith(".safetensors") or len(first) < 8 or length > min(_HEADER_BYTES, size_bytes):
            return None  # the loader will report the problem
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None
    if size_bytes < expected:
        return f"is cut short: {size_bytes} of {expected} bytes"
    return None


def has_chat_template(folder: str, names: list[str]) -> bool | None:
    """Whether the tokenizer will have a chat template (transformers, tokenization_utils_base.py: files, then tokenizer_config.json).

    None for Mistral's own kind of tokenizer, which needs no template.
    """
    if "tekken.json" in names:
        return None
    if "chat_template.jinja" in names:
        return True
    more = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(more) and any(name.endswith(".jinja") for name in os.listdir(more)):
        return True
    config = files.read_json(os.path.join(folder, "tokenizer_config.json"))
    return bool(config.get("chat_template")) if isinstance(config, dict) else False


def template_writes_date(folder: str, names: list[str]) -> bool:
    """Whether a chat template of this folder asks transformers for the time (utils/chat_template_utils.py, strftime_now)."""
    more = os.path.join(folder, "additional_chat_templates")
    inner = [os.path.join(more, name) for name in sorted(os.listdir(more))] if os.path.isdir(more) else []
    for path in [os.path.join(folder, name) for name in _TEMPLATES if name in names] + inner:
        with open(path, "rb") as stream:
            if b"strftime_now" in stream.read(_TEMPLATE_BYTES):
                return True
    return False
