"""final/ has the same files, settings, names, types and shapes, whoever computed what: other tests compare numbers, and the names that they look for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.model import tiny_models
from tests.worker.strategies.test_streamed import of
from tests.worker.training.test_exactness import COMMON
from tests.worker.training.test_preferences import pairs

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]
LAYERS = 12
OF_THE_RUN = ("README.md", "curves.jsonl")  # they say who computed it
WAYS: dict[str, dict[str, Any]] = {
    "stages": {"shares": [0, 12, 0], "stages": [2, 7, 3], "stage_order": [1, 0, 2], "micro_batch": 2},
    "ddp": {"shares": [6, 6]},
    "zero2": {"shares": [6, 6], "strategy": "zero2"},
    "zero3": {"shares": [6, 6], "strategy": "zero3"},
    "layers from the host": {"shares": [12], "streaming": [of(LAYERS - 1)]},
}
LORA, QLORA, FULL = ({"method__kind": kind} for kind in ("lora", "qlora", "full"))
EXPERTS = {"method__targets": "all-linear+experts"}
# Kind of model, precision, recipe.
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "fp32", LORA),
    "lora of one matrix": ("llama", "bf16", {**LORA, "method__targets": ["v_proj"], "train__precision": "bf16"}),
    "lora on both ends": ("llama", "fp32", {**LORA, "method__targets": ["q_proj", "embed_tokens", "lm_head"]}),
    "lora on the head that is the table": ("tied", "fp32", {**LORA, "method__targets": ["q_proj", "lm_head"]}),
    "lora on 8 bits": ("llama", "fp32", {**LORA, "method__base": "8bit"}),
    "qlora, the best weights": ("llama", "fp32", {**QLORA, "train__keep_best": True, "tracking__eval_every_steps": 1}),
    "full in bf16": ("llama", "bf16", {**FULL, "train__precision": "bf16"}),
    "full, head and table are one": ("tied", "fp32", FULL),
    "reward": ("llama", "fp32", {**LORA, "objective__kind": "reward"}),
    "reward of all weights": ("tied", "fp32", {**FULL, "objective__kind": "reward"}),
    "dpo": ("llama", "fp32", {**QLORA, "objective__kind": "dpo"}),
    "lora beside experts": ("mixtral", "fp32", LORA),
    "lora on experts": ("mixtral", "fp32", LORA | EXPERTS),
    "qlora on experts": ("mixtral", "fp32", QLORA | EXPERTS),
    "all weights of a mixture": ("mixtral", "fp32", FULL),
    "all weights and the biases of routers": ("deepseek_v3", "bf16", {**FULL, "train__precision": "bf16"}),
}


def saved(kind: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    harness.tiny_llama(folder, hidden=32, intermediate=64, layers=LAYERS)
    if kind in tiny_models.WITH_BUFFERS:
        return tiny_models.folder_with_buffers(kind, folder, AutoTokenizer.from_pretrained(folder), num_hidden_layers=LAYERS)
    sizes = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": kind == "tied", "num_local_experts": 4}
    config = AutoConfig.for_model(
        "mixtral" if kind == "mixtral" else "llama", **{name: size for name, size in sizes.items() if name != "model_type"}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def described(folder: Path) -> dict[str, Any]:
    """What each file is, but its numbers."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in OF_THE_RUN):
        if path.suffix == ".safetensors":
            found[path.name] = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in load_file(path).items()}
        elif path.name == "adapter_config.json":  # some of its lists are sets
            settings = json.loads(path.read_text())
            found[path.name] = {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}
        else:
            found[path.name] = path.read_text()
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_what_a_run_leaves_is_what_one_process_leaves(name: str, forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    kind, precision, changes = TRAINED[name]
    model, rows = saved(kind, tmp_path / "model"), data
    if "objective__kind" in changes:
        rows = harness.write_jsonl(tmp_path / "pairs.jsonl", pairs(44))
    recipe = COMMON | {"train__steps": 2, "checkpoint__every_steps": 1} | changes
    left = {}
    for way, plan in {"one": {"shares": [12], "micro_batch": 5}, **WAYS}.items():
        if changes["method__kind"] != "full" or "streaming" not in plan:
            run = harness.make_run(tmp_path / way, model, rows, **recipe)
            forks.train(run, 1, precision=precision, timeout_s=150, **plan)
            left[way] = described(run / "final")
    assert {
        way: {file for file in found.keys() | left["one"].keys() if found.get(file) != left["one"].get(file)} for way, found in left.items()
    } == {way: set() for way in left}
