"""What cannot be trained is said before a launch (`model_build`) and by the worker itself, in the same words, each with the edit that helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.worker.errors import WorkerError
from homelab.worker.model import build, pretrained
from homelab.worker.tools import data_sample, model_build
from homelab.worker.training.model_checks import check_loss_is_a_sum
from tests.worker import harness
from tests.worker.model import odd_models

Make = Callable[[Path, Path], Path]
DECODER = "[model] name = a causal language model"
OWN_CODE = {"AutoConfig": "configuration_mini.MiniConfig", "AutoModelForCausalLM": "modeling_mini.Mini"}
ADAPTERS = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"})


def edited(**keys: Any) -> Make:
    return lambda model, folder: odd_models.changed(model, folder, **keys)


def holding(**files: str) -> Make:
    return lambda model, folder: odd_models.without_model(model, folder, {name.replace("__", "."): text for name, text in files.items()})


def with_files(*names: str, without: str = "model.safetensors") -> Make:
    """The tiny model, these files in the place of one of its own."""
    return lambda model, folder: odd_models.replacing(model, folder, without, names)


def described(kind: str, **settings: Any) -> Make:
    """config.json alone decides."""
    return holding(config__json=json.dumps({"model_type": kind, **settings}), model__safetensors="")


# What it is: (the folder, [method] kind, what is seen, what helps)
CASES: dict[str, tuple[Make, str, str, str]] = {
    "a type of a newer release": (edited(model_type="qwen9", transformers_version="99.1.0"), "lora", "does not know models of type qwen9",
                                "homelab setup --upgrade installs the newest release on all nodes (config.json was written with transformers 99.1.0)"),
    "a type that nobody knows": (edited(model_type="lama", transformers_version="4.40.0"), "lora", "the nearest that it knows is llama", "as its maker wrote it"),
    "code of its own": (edited(model_type="minimonkey", auto_map=OWN_CODE), "lora",
                        "has its own code (configuration_mini.py, modeling_mini.py), which homelab never runs", "[model] name"),
    "no type": (edited(model_type=None), "lora", "names no model_type", "copy the folder again"),
    "a config that contradicts itself": (edited(num_attention_heads=5, head_dim=None), "lora", "not a multiple of the number of attention heads", "config.json contradicts itself"),
    "an unknown activation": (edited(hidden_act="hyperglu"), "lora", "hyperglu", "homelab setup --upgrade"),
    "an unknown kind of positions": (edited(rope_parameters={"rope_type": "superyarn", "rope_theta": 1e4, "factor": 2.0}), "lora", "superyarn", "homelab setup --upgrade"),
    "weights of another size": (edited(vocab_size=249), "lora", "lm_head.weight is 259 x 64 in the files and 249 x 64 by config.json and 1 more", "copy the folder again"),
    "adapters": (holding(adapter_config__json=ADAPTERS), "lora",
                 "holds adapters (adapter_config.json), which are not a model alone: they belong to meta-llama/Llama-3.1-8B", '[model] name = "meta-llama/Llama-3.1-8B"'),
    "adapters beside a model": (lambda model, folder: _beside(odd_models.changed(model, folder), "adapter_config.json", ADAPTERS), "lora", "holds adapters", "homelab merge RUN"),
    "GGUF": (lambda model, folder: odd_models.without_model(model, folder, {"tiny-Q4_K_M.gguf": "GGUF"}), "lora", "holds GGUF files", "the 16-bit model that it was made from"),
    "GGUF beside a config": (with_files("tiny-Q4_K_M.gguf"), "lora", "holds GGUF files", "the 16-bit model that it was made from"),
    "a maker's own form beside a config": (with_files("consolidated.00.pth"), "lora", "in its maker's own form", "in the form of transformers"),
    "ONNX": (with_files("model.onnx"), "lora", "for ONNX or OpenVINO only", "in the form of transformers"),
    "TensorFlow": (with_files("tf_model.h5"), "lora", "for TensorFlow or Flax only", "in the form of transformers"),
    "Flax": (with_files("flax_model.msgpack"), "lora", "for TensorFlow or Flax only", "in the form of transformers"),
    "diffusers": (holding(model_index__json="{}"), "lora", "a model of diffusers", DECODER),
    "a part of diffusers": (with_files("diffusion_pytorch_model.safetensors"), "lora", "a model of diffusers", DECODER),
    "sentence-transformers": (holding(modules__json="[]"), "lora", "a model of sentence-transformers", DECODER),
    "no weights": (with_files(), "lora", "has no weights (model.safetensors", "rsync -a MODEL/ NODE:"),
    "a part of the weights is missing": (lambda model, folder: odd_models.in_parts(model, folder, missing="model-00002"), "lora",
                                         "has no model-00002-of-", "rsync -a MODEL/ NODE:"),
    "a list for a config": (lambda model, folder: _beside(odd_models.changed(model, folder), "config.json", "[]"), "lora", "is not a JSON object", "copy the folder again"),
    "a list for a type": (edited(model_type=["llama"]), "lora", "names no model_type", "copy the folder again"),
    "a padding token without a row": (edited(pad_token_id=99_999), "lora", "Padding_idx", "pad_token_id < vocab_size"),
    **{name: (described(name), "lora", "is not a causal language model", DECODER) for name in ("qwen2_vl", "llava", "qwen2_audio", "clip")},
    "mamba, quantised": (described("mamba", hidden_size=32, num_hidden_layers=2, state_size=8), "qlora", "so it cannot be quantised", 'kind = "lora" without base'),
    "a maker's own form": (holding(params__json="{}"), "lora", "in its maker's own form", "in the form of transformers"),
    "no config": (holding(README__md="hello"), "lora", "has no config.json", "rsync -a MODEL/ NODE:"),
    **{name: (lambda model, folder, name=name: odd_models.other(model, folder, name), "lora", seen, DECODER)
       for name, seen in {**dict.fromkeys(("bert", "roberta", "modernbert"), "is an encoder"), **dict.fromkeys(("t5", "bart"), "reads with an encoder")}.items()},
    "a reward model": (lambda model, folder: odd_models.other(model, folder, "a reward model"), "lora",
                       "the files lack lm_head.weight, which LlamaForCausalLM needs: they were saved by LlamaForSequenceClassification", "trained as the model that"),
    "a model for embeddings": (lambda model, folder: odd_models.other(model, folder, "a model for embeddings"), "full", "lack lm_head.weight", "trained as the model that"),
    **{name: (edited(quantization_config=said), kind, "the weights of this model are quantised already", "the 16-bit model that it was made from")
       for name, said in odd_models.QUANTISED.items() for kind in ("lora",)},
    "gptq, quantised once more": (edited(quantization_config=odd_models.QUANTISED["gptq"]), "qlora", "GPTQ in 4 bits", 'kind = "qlora" quantises that one to 4 bits'),
    "4 bits, all weights": (lambda model, folder: odd_models.quantised(model, folder, 4), "full", "these are rounded", 'kind = "lora" trains adapters on them'),
    "8 bits, once more": (lambda model, folder: odd_models.quantised(model, folder, 8), "qlora", "quantised twice", 'kind = "lora" keeps them as they are'),
    "fp8, once more": (lambda model, folder: odd_models.in_eight_float_bits(model, _made(folder))[0], "qlora", "quantised twice", 'kind = "lora" trains adapters on them'),
}  # fmt: skip


def _beside(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def question(folder: Path, **method: Any) -> dict[str, Any]:
    recipe = harness.resolved_recipe(**{f"method__{key}": value for key, value in method.items()})
    return {"model": str(folder), "method": recipe["method"], "train": recipe["train"], "precision": "fp32"}


def load_as_a_rank(folder: Path, tmp_path: Path, **method: Any) -> Any:
    """What a rank does before its first step."""
    task = harness.task_of(
        tmp_path / "work" / "runs" / "run", model__name=str(folder), **{f"method__{key}": value for key, value in method.items()}
    )
    path = pretrained.model_path(task.run)
    build.refuse_unfit(task, path)
    pretrained.load_tokenizer(task.run, path)
    return build.load_model(task, path, lambda note: None)


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_trained_is_named_before_a_launch_and_by_the_worker(name: str, model: Path, tmp_path: Path) -> None:
    make, kind, seen, helps = CASES[name]
    folder = make(model, tmp_path / "odd")

    findings = model_build.look(question(folder, kind=kind))["findings"]
    assert [finding["level"] for finding in findings] == ["fail"], findings
    assert seen in findings[0]["message"] and helps in findings[0]["hint"]

    with pytest.raises(WorkerError) as refused:
        load_as_a_rank(folder, tmp_path, kind=kind)
    assert seen in refused.value.message and helps in refused.value.hint
    assert "HF_TOKEN" not in refused.value.hint, "nothing here is missing on the hub"


@pytest.mark.parametrize("name", ["plain", "code beside a known type", "4 bits", "4 bits, qlora", "8 bits", "fp8"])
def test_what_can_be_trained_is_refused_by_neither(name: str, model: Path, tmp_path: Path) -> None:
    folder = {
        "plain": lambda: model,
        "code beside a known type": lambda: odd_models.changed(model, tmp_path / "odd", auto_map=OWN_CODE),
        "4 bits": lambda: odd_models.quantised(model, tmp_path / "odd", 4),
        "4 bits, qlora": lambda: odd_models.quantised(model, tmp_path / "odd", 4),
        "8 bits": lambda: odd_models.quantised(model, tmp_path / "odd", 8),
        "fp8": lambda: odd_models.in_eight_float_bits(model, tmp_path)[0],
    }[name]()
    kind = "qlora" if name.endswith("qlora") else "lora"

    found = model_build.look(question(folder, kind=kind))
    loaded = load_as_a_rank(folder, tmp_path, kind=kind)

    assert found["findings"] == []
    assert found["trained"] == sum(parameter.numel() for parameter in loaded.parameters() if parameter.requires_grad) > 0
    tokens = torch.arange(3, 12).unsqueeze(0)
    loaded.train()(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp8_is_read_as_the_values_that_it_stands_for_in_the_precision_of_the_plan(precision: str, model: Path, tmp_path: Path) -> None:
    """Never computed in: a card with kernels for it would compute another function than one without."""
    narrow, plain = odd_models.in_eight_float_bits(model, tmp_path)

    loaded, expected = (build.load_base(str(folder), None, None, pretrained.DTYPES[precision], None, "here") for folder in (narrow, plain))

    assert {parameter.dtype for parameter in loaded.parameters()} == {pretrained.DTYPES[precision]}
    tokens = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        apart = (loaded(input_ids=tokens).logits - expected(input_ids=tokens).logits).abs().max()
    assert apart <= (1e-6 if precision == "fp32" else 1e-2)


def test_a_loss_without_a_sum_is_seen_without_a_number(model: Path, tmp_path: Path) -> None:
    folder = odd_models.other(model, tmp_path / "odd", "xlnet")

    (finding,) = model_build.look(question(folder))["findings"]
    assert finding["level"] == "fail" and "does not divide its loss" in finding["message"]
    with pytest.raises(WorkerError, match="averaged per pass") as refused:
        check_loss_is_a_sum(load_as_a_rank(folder, tmp_path, kind="lora"), torch.device("cpu"))
    assert "one node" not in refused.value.hint, "on one node it depends on the micro-batch in the same way"


def test_a_folder_without_a_tokenizer_is_copied_again(model: Path, tmp_path: Path) -> None:
    folder = odd_models.changed(model, tmp_path / "odd")
    for file in odd_models.FILES:
        (folder / file).unlink(missing_ok=True)

    for load in (lambda: load_as_a_rank(folder, tmp_path, kind="lora"), lambda: data_sample.load(str(folder), None)):
        with pytest.raises(WorkerError, match="has no tokenizer") as refused:
            load()
        assert f"rsync -a MODEL/ NODE:{folder}/" in refused.value.hint


@pytest.mark.parametrize("part", ["model", "pre_tokenizer"])
def test_a_tokenizer_of_a_newer_release_is_no_bare_exception(part: str, model: Path, tmp_path: Path) -> None:
    folder = odd_models.with_tokenizer(model, tmp_path / "odd", lambda content: content[part].update(type="HyperBPE"))

    with pytest.raises(WorkerError) as of_worker:
        load_as_a_rank(folder, tmp_path, kind="lora")
    with pytest.raises(WorkerError) as of_sample:
        data_sample.load(str(folder), None)
    for error in (of_worker.value, of_sample.value):
        assert "homelab setup --upgrade" in error.hint and "untagged enum" in error.message


def test_what_is_no_fault_of_the_model_passes_as_it_is() -> None:
    from homelab.worker.model.base_kind import load_error

    full, memory, card = OSError(28, "No space left on device"), MemoryError(), RuntimeError("CUDA error: out of memory")
    for error in (full, memory, card):
        assert load_error(error, "m") is error
