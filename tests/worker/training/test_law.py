"""The law: a recipe alone decides the training. What the numbers must be, and what stops a run; that they are the same on any
cluster, test_exactness says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.law import order
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TOLERANCE = 1e-5  # relative, in fp32; measured 6e-8 to 3e-6


def assert_every_sample_once_per_epoch(run: Path, attempts: dict[int, int], *, ranks: int, steps: int) -> None:
    """`attempts` maps each attempt to the last step that counts of it (later ones were done again by the next attempt)."""
    seen: dict[int, list[int]] = {}
    counted: set[int] = set()
    first = 1
    for attempt, last in attempts.items():
        for rank in range(ranks):
            for line in harness.lines(run, attempt, rank, "samples.jsonl"):
                if first <= line["step"] <= last:
                    seen.setdefault(line["epoch"], []).extend(line["ids"])
                    counted.add(line["step"])
        first = last + 1
    assert counted == set(range(1, steps + 1))
    everyone = sorted(seen[0])
    assert len(everyone) == len(set(everyone)) >= 40
    assert all(sorted(ids) == everyone for ids in seen.values())


def test_the_first_loss_is_the_mean_over_all_tokens_of_the_batch(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """Against plain transformers: one row at a time, no padding, cross entropy summed by hand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = harness.make_run(tmp_path / "run", model, data, train__steps=2, train__epochs=None)
    forks.train(run, 1, [7, 5], micro_batch=2)
    (step_one,) = [line for line in harness.lines(run, 1, 0, "samples.jsonl") if line["step"] == 1]
    (other,) = [line for line in harness.lines(run, 1, 1, "samples.jsonl") if line["step"] == 1]
    ids = step_one["ids"] + other["ids"]
    assert len(ids) == 12

    tokenizer, llama = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    summed, counted = 0.0, 0
    for index in ids:
        text = tokenizer.apply_chat_template(rows[index]["messages"], tokenize=False)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        wanted = torch.zeros(len(tokens), dtype=torch.bool)
        end = 0
        for message in rows[index]["messages"]:  # one token per byte, so characters are positions... but for the special tokens
            if message["role"] == "assistant":
                pieces = tokenizer.convert_ids_to_tokens(tokens.tolist())
                joined = "".join(piece if len(piece) == 1 else "\0" for piece in pieces)
                start = joined.index("\0assistantĊ" + message["content"].replace(" ", "Ġ"), end) + len("\0assistantĊ")
                end = start + len(message["content"]) + 1
                wanted[start:end] = True
        with torch.no_grad():
            logits = llama(tokens.unsqueeze(0)).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        summed += float(each[wanted[1:]].sum())
        counted += int(wanted.sum())
    assert harness.losses(run, 1)[1] == pytest.approx(summed / counted, rel=1e-6)


def test_dropout_is_the_same_on_any_cluster_with_one_row_per_micro_batch(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    recipe: dict[str, Any] = {"method__kind": "lora", "method__dropout": 0.2, "train__steps": 3, "train__epochs": None}
    recipe["parallel__micro_batch"] = 1
    one = harness.make_run(tmp_path / "one", model, data, **recipe)
    two = harness.make_run(tmp_path / "two", model, data, **recipe)
    forks.train(one, 1, [12], micro_batch=1)
    forks.train(two, 1, [9, 3], micro_batch=1)
    assert harness.losses(two, 1) == pytest.approx(harness.losses(one, 1), rel=TOLERANCE)
    assert harness.relative_error(harness.weights(two, 3), harness.weights(one, 3)) < TOLERANCE
    assert any("dropout" in line["message"] for line in harness.lines(one, 1, 0, "metrics.jsonl", "note"))


def test_a_loss_that_is_not_a_number_names_its_rank_and_node_and_the_checkpoint_before_goes_on(
    forks: harness.Forks, tmp_path: Path, model: Path
) -> None:
    """The model lies damaged on the nodes: one token's embedding is NaN, and one row has that token. Copied again, the run ends well."""
    import torch
    from transformers import AutoModelForCausalLM

    from homelab.worker.checkpoints import checkpoint_folder

    step, shares = 4, [2, 5, 5]
    row = order.step_rows(step - 1, seed=42, count=44, global_batch=12)[1][3]
    rows = harness.chat_rows(44)
    rows[row]["messages"][0]["content"] += "~"
    data = harness.write_jsonl(tmp_path / "d.jsonl", rows)
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    recipe: dict[str, Any] = {"method__kind": "lora", "train__epochs": 2, "checkpoint__every_steps": 1}
    good = harness.make_run(tmp_path / "good", folder, data, **recipe)
    forks.train(good, 1, shares)
    guilty = next(
        rank for rank in range(3) for line in harness.lines(good, 1, rank, "samples.jsonl") if line["step"] == step and row in line["ids"]
    )

    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["~"]] = float("nan")
    broken.save_pretrained(folder)
    run = harness.make_run(tmp_path / "run", folder, data, **recipe)
    places = ["a", "b", "b"]
    codes, output = forks.run(run, 1, shares, nodes=places)
    assert codes == [1, 1, 1] and "Traceback" not in output, output
    errors = [harness.error_of(run, 1, rank) for rank in range(3)]
    for rank, error in enumerate(errors):
        assert error["message"] == f"the loss is not a number in step {step} on rank {guilty} ({places[guilty]})"
        assert ("this rank's rows" in error["where"] and str(row) in error["where"]) == (rank == guilty)
    assert max(harness.losses(run, 1)) == step - 1
    for node in ("a", "b"):
        kept = harness.folder_of(run, node, places) / "checkpoints"
        assert checkpoint_folder.complete_steps(kept) == [1, 2, 3], "none after the step that went wrong"

    shutil.copytree(model, folder, dirs_exist_ok=True)
    forks.train(run, 2, [7, 5], resume_step=step - 1)
    expected = harness.losses(good, 1)
    assert harness.losses(run, 1) | harness.losses(run, 2) == pytest.approx(expected, rel=TOLERANCE)
    last = max(expected)
    assert harness.relative_error(harness.weights(run, last), harness.weights(good, last)) < TOLERANCE


@pytest.mark.parametrize("method", [{"method__kind": "qlora"}, {"method__kind": "lora", "method__base": "8bit"}], ids=["nf4", "8bit"])
def test_the_gradient_reaches_every_adapter_of_a_quantized_model(tmp_path: Path, model: Path, method: dict[str, Any]) -> None:
    """bitsandbytes repacks weights in eval mode on some CPUs, and then the backward pass stops there without a word.

    Compared with plain LoRA on the dequantized weights, before and after a forward pass in eval mode.
    """
    import bitsandbytes
    import torch
    from transformers import AutoModelForCausalLM

    from homelab.worker.model.build import add_adapters, load_model
    from homelab.worker.runtime.task import Task

    run = harness.make_run(tmp_path / "run", model, harness.write_jsonl(tmp_path / "d.jsonl", harness.chat_rows(1)), **method)
    harness.make_plan(run, 1, [12])
    files = [json.loads((run / name).read_text()) for name in ("run.json", "attempts/1/plan.json")]
    task = Task(run, 1, "here", 0, 0, 1, *files)
    quantized = load_model(task, str(model), lambda note: None)
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for name, part in quantized.get_base_model().named_modules():
            if isinstance(part, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(part.weight.data, part.weight.quant_state)
                plain.get_submodule(name.replace(".base_layer", "")).weight.copy_(weight)
            elif isinstance(part, bitsandbytes.nn.Linear8bitLt):
                weight = bitsandbytes.functional.int8_vectorwise_dequant(part.weight.data, part.weight.SCB)
                plain.get_submodule(name.replace(".base_layer", "")).weight.copy_(weight)
    plain = add_adapters(plain, task.method, task.train.seed)
    tokens = torch.arange(3, 40).unsqueeze(0)

    def gradients(adapted) -> dict[str, torch.Tensor]:
        adapted.eval()
        with torch.no_grad():
            adapted(input_ids=tokens)
        adapted.train()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)  # at zero, half of the gradients would be zero
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        return {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}

    expected, found = gradients(plain), gradients(quantized)
    assert len(found) == 28 and all(gradient is not None and gradient.any() for gradient in found.values())
    assert harness.relative_error(found, expected) < 1e-3
