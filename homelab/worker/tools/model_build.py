"""python -m homelab.worker.tools.model_build: would the worker train this base model in this way? Its own build, on the meta device: no weight is read.

Reads one JSON object from standard input:

    {"model": folder or hub id, "revision": null, "method": [method], "train": [train], "precision": "bf16", "strategy": "ddp"}

and prints {"findings": [{"topic", "level", "message", "where", "hint"}], "seconds"} and, of a model that could be built, "trained" and "total"
(numbers of weights), "embedding_rows", "positions" (null: any), "largest_id" and
"beyond" (the tokens that the embedding lacks), "loose_experts_bytes" (routed experts that a quantised base leaves as they are). With "fetch": true (and
"known", names that a person may have meant) the small files come from the hub first, and "config" and "has_chat_template" are said, too.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.model import base_kind
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import hub_model


def look(question: dict[str, Any]) -> dict[str, Any]:
    """What the model of the question is, and every finding that a person should know before a launch."""
    import torch

    from homelab.worker.model import row_limits, stored_weights
    from homelab.worker.tools import memory_dry_run

    path, revision, findings = os.path.expanduser(str(question["model"])), question.get("revision"), []
    method, train = question["method"], question["train"]
    said: dict[str, Any] = {}
    try:
        weights = Weights.of_folder(path)
        if question.get("fetch"):
            repository = hub_model.fetch(path, revision, question.get("known") or ())
            base_kind.refuse_files(repository.names, repository.folder, path)
            revision, weights, said = repository.commit, Weights(repository.sizes, repository.tensors), _of_repository(repository)
            # Nothing more is asked of the hub: what was not fetched is not there.
            from huggingface_hub import constants

            constants.HF_HUB_OFFLINE = True
        config = base_kind.config_of(path, revision)
        stored = stored_weights.of(config)
        stored_weights.refuse(stored, section(Method, {"method": method}), path)
        # The loss of all logits at once: how it is computed changes nothing of what is asked here.
        settings = {**train, "fused_loss": False, "gradient_checkpointing": False}
        with torch.device("meta"):
            base = (
                memory_dry_run.build_of(config, stored, {**method, "kind": "full", "base": "auto"}, settings, "bf16")
                if stored is None
                else None
            )
            findings += list(_of_files(base, path, weights)) if base is not None else []
            model = memory_dry_run.build_of(config, stored, method, settings, question["precision"])
            if question.get("strategy") == "pipeline":
                from homelab.worker.strategies.pipeline import stage_model

                stage_model.decoder_of(model)
    except WorkerError as error:
        return {**said, "findings": [*findings, {"topic": _topic(error), "level": getattr(error, "level", "fail"), **_plain(error)}]}
    limits, held = row_limits.of(model), stored_weights.held(stored, section(Method, {"method": method}).quantisation)
    figures = {
        **_figures(model), **_tokens(path, revision, limits.ids), "embedding_rows": limits.ids, "positions": limits.positions,
        "loose_experts_bytes": _loose_experts_bytes(model, held),
    }  # fmt: skip
    if question.get("fetch"):
        findings += _of_tokenizer(path, revision)
    return {**said, **figures, "findings": [*findings, *_of_model(model)]}


@dataclass(frozen=True)
class Weights:
    """`sizes`: those of the tensors in the files, as far as they were read; `tensors`: the names of all. Nothing where there are no safetensors."""

    sizes: dict[str, tuple[int, ...]]
    tensors: frozenset[str]

    @classmethod
    def of_folder(cls, path: str) -> Weights:
        """Of a folder on this node, or none."""
        sizes = _sizes(Path(path)) if os.path.isdir(path) else {}
        return cls(sizes, frozenset(sizes))


def _of_repository(repository: hub_model.Repository) -> dict[str, Any]:
    """What a node that has the model tells by its facts."""
    names, tokenizer = repository.names, base_kind.read_object(repository.folder / "tokenizer_config.json")
    has_template = any(name.endswith(".jinja") for name in names) or bool(tokenizer.get("chat_template"))
    return {
        "config": base_kind.read_object(repository.folder / "config.json"),
        "has_chat_template": None if "tekken.json" in names else has_template,
    }


def _topic(error: WorkerError) -> str:
    """The check that the error belongs to: what the hub has, what the model is, how its weights are stored, or where its adapters go."""
    if isinstance(error, hub_model.HubError):
        return "hub"
    if "targets" in error.where or "dropout" in error.where:
        return "adapters"
    return "stored" if "quantised already" in error.message else "kind"


def _plain(error: WorkerError) -> dict[str, str]:
    return {key: text[:1000] for key, text in error.as_dict().items() if key in ("message", "where", "hint")}


def _of_model(model: Any) -> Iterator[dict[str, str]]:
    from homelab.worker.model import inspection

    unreached = inspection.without_gradient(model)
    if unreached:
        names = list(dict.fromkeys(inspection.pattern(name.removeprefix("base_model.model.").split(".lora_")[0]) for name in unreached))
        yield {
            "topic": "gradient", "level": "warn", "where": "[method] in the recipe",
            "message": f"{len(unreached)} of the weights to train get no gradient from a text: {', '.join(names[:4])[:300]}",
            "hint": "edit the recipe: leave them out of targets; the worker does not train them, and notes it",
        }  # fmt: skip
    if _counts_items(model) is False:
        yield {
            "topic": "kind", "level": "fail", "where": "[model] name in the recipe",
            "message": f"{type(inspection.base_of(model)).__name__} does not divide its loss by the tokens of the whole batch: its curve would depend on the cluster",
            "hint": "edit the recipe: [model] name = a model whose class does (those of Llama, Qwen, Mistral, Gemma, Phi, GPT-2 and most others do)",
        }  # fmt: skip


def _counts_items(model: Any) -> bool | None:
    """`model_checks.counts_items`; of a model that looks at numbers, on tensors that claim to have some. It leaves such ones in the model."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from homelab.worker.tools.memory_dry_run import materialise
    from homelab.worker.training.model_checks import counts_items

    counted = counts_items(model)
    if counted is not None:
        return counted
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model)
        return counts_items(model)


def _figures(model: Any) -> dict[str, Any]:
    from homelab.worker.model import inspection

    return {
        "trained": inspection.inspect(model).trained,
        "total": sum(parameter.numel() for parameter in inspection.base_of(model).parameters()),
    }


def _tokens(path: str, revision: str | None, ids: int | None) -> dict[str, Any]:
    """The largest id of the tokenizer, and its first tokens that the embedding lacks. Nothing of a tokenizer that does not load: the look into the data says so."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        known = tokenizer.get_vocab()
    except Exception:  # noqa: BLE001 - a tokenizer of any kind: nothing is known of it
        return {}
    beyond = sorted((number, text) for text, number in known.items() if ids is not None and number >= ids)
    return {"largest_id": max(known.values(), default=0), "beyond": {str(number): text[:60] for number, text in beyond[:3]}}


def _of_tokenizer(path: str, revision: str | None) -> Iterator[dict[str, str]]:
    """Why the tokenizer of a fetched model does not load: the look into the data has none to try."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds; `load_error` sorts them
        known = base_kind.load_error(error, path, "tokenizer")
        if isinstance(known, WorkerError):
            yield {"topic": "tokenizer", "level": "fail", **_plain(known)}


def _of_files(base: Any, path: str, weights: Weights) -> Iterator[dict[str, str]]:
    """What the heads of the safetensors files say of the weights, against the model that config.json describes."""
    from homelab.worker.model import inspection

    sizes = weights.sizes
    if not weights.tensors:
        return
    wanted = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    other = [(name, sizes[name], shape) for name, shape in wanted.items() if name in sizes and sizes[name] != shape]
    head = next((name for name, part in base.named_modules() if part is base.get_output_embeddings()), "")
    is_tied = any(f"{head}.weight" in names for names in inspection.tied(base))
    last = head.rsplit(".", 1)[-1]
    if other:
        yield {"topic": "weights", "level": "fail", **_plain(base_kind.of_other_sizes(other, path))}
    elif head and not is_tied and not any(name.endswith(f"{last}.weight") for name in weights.tensors):
        error = base_kind.lacks([f"{head}.weight"], type(base).__name__, path, base.config.architectures)
        yield {"topic": "weights", "level": "fail", **_plain(error)}


def _sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> size of every tensor in the folder's safetensors files; nothing where there are none, or one cannot be read."""
    from safetensors import SafetensorError, safe_open

    sizes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(str(file), framework="pt") as content:
                sizes |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118 (no dict)
    except (OSError, SafetensorError):  # the probe of the files says what is wrong with them
        return {}
    return sizes


def _loose_experts_bytes(model: Any, held: str | None) -> int | None:
    """Bytes of the routed experts that stay as wide as they were while the base is quantised; None for a base that is not."""
    if held is None:
        return None
    from homelab.worker.model import experts_loading

    return experts_loading.unquantised(model)[2]


def main() -> int:
    """Read the question, print the answer."""
    began = time.perf_counter()
    question = json.load(sys.stdin)
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    os.environ["HF_HUB_OFFLINE"] = "0" if question.get("fetch") else "1"
    os.nice(10)
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    answer = look(question)
    print(json.dumps({**answer, "seconds": round(time.perf_counter() - began, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
