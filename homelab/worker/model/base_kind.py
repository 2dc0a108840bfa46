"""What a base model is, before any of its weights is read: a folder that holds one, a kind that transformers knows, a causal language model.

Everything here is a user's choice that cannot be trained, so it is said with the choice that can. The same words come from a rank and from
`homelab preflight` (`homelab.worker.tools.model_build`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from homelab.shared.law import model_kinds, usable
from homelab.shared.protocol import model_forms
from homelab.worker.errors import WorkerError

WHERE = "[model] name in the recipe"
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def refuse_folder(folder: Path) -> None:
    """Raises WorkerError for a folder without a base model, with what it holds instead, and for adapters beside a model."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    refuse_files(names, folder, str(folder))
    if "config.json" not in names:
        fault = "is not a model folder: it has no config.json" if folder.is_dir() else "does not exist on this node"
        raise WorkerError(
            f"the model folder {folder} {fault}", where=WHERE,
            hint=f"{_copied(folder)}, or give a hub id like org/name",
        )  # fmt: skip
    lacking = model_forms.lacking(str(folder), names)
    if lacking:
        raise WorkerError(f"the model folder {folder} has {lacking}", where=WHERE, hint=_copied(folder))


def _copied(folder: Path | str) -> str:
    return f"copy the model there on every node (`rsync -a MODEL/ NODE:{shlex.quote(str(folder).rstrip('/') + '/')}`)"


def refuse_files(names: Sequence[str], folder: Path, shown: str) -> None:
    """Raises WorkerError where files with these names are no base model but something known. `folder`: where the small ones can be read."""
    kind = model_forms.instead(names)
    if kind == model_forms.ADAPTERS:
        raise _adapters(read_object(folder / "adapter_config.json"), shown)
    if kind == model_forms.GGUF:
        raise gguf(shown)
    if kind:
        seen, edit = model_forms.HELD[kind]
        raise WorkerError(f"{shown} {seen}", where=WHERE, hint=f"edit the recipe: {edit}", needs_launch=True)


def _adapters(settings: dict[str, Any], shown: str) -> WorkerError:
    base = str(settings.get("base_model_name_or_path") or "")[:200]
    named = f'edit the recipe: [model] name = "{base}"' if base else "edit the recipe: [model] name = the model that they belong to"
    return WorkerError(
        f"{shown} {model_forms.HELD[model_forms.ADAPTERS][0]}{f': they belong to {base}' if base else ''}", where=WHERE,
        hint=f"{named}; to continue from these adapters, merge them into their model first (homelab merge RUN, or PEFT's merge_and_unload) and name the result", needs_launch=True,
    )  # fmt: skip


def gguf(shown: str) -> WorkerError:
    """The error for a folder or a repository of GGUF files."""
    return WorkerError(
        f"{shown} {model_forms.HELD[model_forms.GGUF][0]}", where=WHERE,
        hint=f"edit the recipe: [model] name = {usable.original_of(shown)}; homelab gguf RUN makes a GGUF of the result", needs_launch=True,
    )  # fmt: skip


def refuse_config(config: object, where: str) -> None:
    """Raises WorkerError for a config.json (as JSON) of which the installed transformers builds no model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(config, dict):
        raise WorkerError(
            "config.json is not a JSON object", where=where, hint="the file is damaged: copy the folder again from its source"
        )
    kind, own_code = config.get("model_type"), config.get("auto_map")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    if isinstance(own_code, dict) and own_code:
        files = sorted({str(value).split("--")[-1].partition(".")[0] + ".py" for value in own_code.values() if isinstance(value, str)})
        raise WorkerError(
            f"a model of type {kind} has its own code ({', '.join(files)[:200]}), which homelab never runs", where=where,
            hint="edit the recipe: [model] name = the same model in the form of transformers (its name often ends in -hf), or another one", needs_launch=True,
        )  # fmt: skip
    if not isinstance(kind, str) or not kind:
        raise WorkerError(
            "config.json names no model_type, so transformers does not know what to build", where=where,
            hint="copy the folder again from its source; a config.json of another program (timm, sentence-transformers, diffusers) is not a language model",
        )  # fmt: skip
    installed, written = transformers.__version__, str(config.get("transformers_version") or "")
    newer = bool(written) and _release(written) > _release(installed)
    seen = f"transformers {installed} on this node does not know models of type {kind}"
    if newer:
        hint = f"homelab setup --upgrade installs the newest release on all nodes (config.json was written with transformers {written})"
        raise WorkerError(seen, where=where, hint=hint)
    hint = (
        f'is model_type = "{kind}" in config.json as its maker wrote it? If so, a newer transformers may know it: homelab setup --upgrade'
    )
    raise WorkerError(f"{seen}{_nearly(kind, CONFIG_MAPPING)}", where=where, hint=hint)


def _nearly(kind: str, known: Any) -> str:
    import difflib

    near = difflib.get_close_matches(kind, list(known.keys()), n=1, cutoff=0.75)
    return f"; the nearest that it knows is {near[0]}" if near else ""


def refuse_kind(config: Any) -> None:
    """Raises WorkerError for a configuration (transformers' own) that is no causal language model's."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    kind, classes = config.model_type, config.architectures or []
    name = classes[0] if classes else kind
    if getattr(config, "is_encoder_decoder", False):
        raise WorkerError(model_kinds.with_encoder(name), where=WHERE, hint=model_kinds.DECODER, needs_launch=True)
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    sees_all = type(config) in AutoModelForMaskedLM._model_mapping
    if sees_all and not (is_causal and (getattr(config, "is_decoder", False) or getattr(config, "causal", False))):
        raise WorkerError(model_kinds.encoder(name), where=WHERE, hint=model_kinds.DECODER, needs_launch=True)
    if not is_causal:
        raise WorkerError(model_kinds.no_language_model(name, kind), where=WHERE, hint=model_kinds.DECODER, needs_launch=True)


def config_of(path: str, revision: str | None) -> Any:
    """transformers' configuration of the base model. Raises WorkerError for what cannot be trained."""
    from transformers import AutoConfig, PreTrainedConfig

    if os.path.isdir(path):
        refuse_folder(Path(path))
    try:
        said, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds; `_again` sorts them
        _again(error, path)
    refuse_config(said, f"config.json of {path}")
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds; `_again` sorts them
        _again(error, path)
    refuse_kind(config)
    return config


def _again(error: Exception, path: str) -> NoReturn:
    known = load_error(error, path)
    if known is error:
        raise error
    raise known from error


def whole(loaded: tuple[Any, Mapping[str, Any]], path: str) -> Any:
    """The model of what transformers loaded with its report, the whole or a stage. Raises WorkerError where the files lack some of its weights:
    transformers makes random ones in their place, others on every rank."""
    model, info = loaded
    if info["mismatched_keys"]:
        sizes = [(str(name), tuple(stored), tuple(wanted)) for name, stored, wanted in info["mismatched_keys"]]
        raise of_other_sizes(sizes, path)
    missing = sorted(info["missing_keys"])
    if missing:
        raise lacks(missing, type(model).__name__, path, model.config.architectures)
    return model


def lacks(missing: Sequence[str], built: str, path: str, classes: Sequence[str] | None) -> WorkerError:
    """The error for files without some of the weights of the model (names of them) that is built."""
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    made_for = next(iter(classes or ()), "")
    which = f": they were saved by {made_for}" if made_for and made_for != built else ""
    return WorkerError(
        f"the files lack {shown}, which {built} needs{which}", where=f"[model] name = {path!r}",
        hint="these would start as random numbers. Copy the folder again if a file is missing; a model without a language head (embeddings, "
        "rewards, classes) can be trained as the model that it was made from: edit the recipe, [model] name",
    )  # fmt: skip


def of_other_sizes(sizes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], path: str) -> WorkerError:
    """The error for weights (name, size in the files, size that config.json wants) that config.json does not describe."""
    name, stored, wanted = min(sizes)
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return WorkerError(
        f"config.json does not describe these weights: {name} is {_by(stored)} in the files and {_by(wanted)} by config.json{more}", where=f"[model] name = {path!r}",
        hint="copy the folder again from its source; if tokens were added, vocab_size in config.json must be the number of rows of the embedding",
    )  # fmt: skip


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def load_error(error: Exception, path: str, what: str = "model") -> Exception:
    """What a person should read in place of an error of transformers, tokenizers or the hub; the error itself where it is not about the model."""
    if isinstance(error, WorkerError) or getattr(error, "errno", None) in _OF_THE_MACHINE or isinstance(error, MemoryError):
        return error
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    first = (lines[-1] if lines[0].endswith(":") else lines[0])[:300]
    where = f"[model] name = {path!r}"
    if what == "tokenizer" and os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in model_forms.TOKENIZERS):
        return WorkerError(
            f"the model folder {path} has no tokenizer ({' or '.join(model_forms.TOKENIZERS[:3])})", where=where, hint=_copied(path)
        )
    for pattern, hint in _KNOWN_FAULTS:
        if re.search(pattern, text, re.I | re.S):
            seen = f"{type(error).__name__}: {first}" if isinstance(error, KeyError) else first
            return WorkerError(f"the {what} cannot be loaded: {seen}", where=where, hint=hint)
    if type(error).__name__ in ("RuntimeError", "OutOfMemoryError", "AcceleratorError"):  # of torch: the machine's, or ours
        return error
    if isinstance(error, ImportError):
        return WorkerError(
            f"the {what} needs a package: {first}", where=where,
            hint="install that package in the node's environment, or choose a model that needs none (homelab setup installs the usual ones)",
        )  # fmt: skip
    if isinstance(error, OSError):
        return WorkerError(
            f"the {what} cannot be loaded: {first}",
            where=where,
            hint="check the name; copy a damaged folder again; a private or gated model needs HF_TOKEN",
        )
    return WorkerError(
        f"the {what} cannot be loaded: {type(error).__name__}: {first}", where=where,
        hint="the files do not work with the installed transformers: copy the folder again from its source, or install newer packages: homelab setup --upgrade",
    )  # fmt: skip


# What the words of transformers 5, tokenizers and huggingface_hub mean, from specific to general.
_KNOWN_FAULTS = (
    (r"untagged enum|unknown variant|EnumUntagged",
     "tokenizer.json was written by a newer release of tokenizers than this node has: homelab setup --upgrade; or the file is damaged: copy it again"),
    (r"ignore_mismatched_sizes|size mismatch", "the sizes in config.json and in the weights differ, so they are of different models; copy the folder again from its source"),
    (r"gated repo", "accept the terms on the model's page of the hub, then set HF_TOKEN here: a launch sends it to the nodes"),
    (r"not a valid model identifier|Repository Not Found|404 Client", "check the name (org/name, as on the hub); a private model needs HF_TOKEN"),
    (r"couldn't connect|offline mode|Cannot reach|Temporary failure in name resolution|LocalEntryNotFound",
     "the hub cannot be reached from this node, and the model is not in its cache: homelab setup --recipe RECIPE sends it from here"),
    (r"does not appear to have a file named config\.json",
     "this repository has no complete model: are they adapters, or GGUF files? Edit the recipe: [model] name = the model that they belong to"),
    (r"not a valid JSON|Expecting |Extra data|Unterminated string|EOF while parsing", "a JSON file of the folder is damaged: copy the folder again from its source"),
    (r"Padding_idx must be within", "config.json says a pad_token_id that the embedding has no row for: copy the folder again, or edit its config.json: pad_token_id < vocab_size"),
    (r"not a multiple of|must be divisible|Class validation error|Field .* expected", "config.json contradicts itself: copy it again from the source of the model"),
    (r"sentencepiece|tiktoken|protobuf", "install the packages of its tokenizer in the node's environment: pip install sentencepiece tiktoken protobuf"),
)  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model's folder; {} where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
