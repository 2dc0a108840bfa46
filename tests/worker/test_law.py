"""The law: a recipe alone decides the training. One process and three with shares 6, 4 and 2 must give the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TOLERANCE = 1e-5  # relative, in fp32; measured 6e-8 to 3e-6
CASES: dict[str, dict[str, Any]] = {
    "full": {
        "shares": [6, 4, 2],
        "micro_batch": [2, 3, 1],
        "recipe": {"method__kind": "full", "data__eval_fraction": 0.1},
    },
    "lora packed": {
        "shares": [8, 4, 0],
        "micro_batch": 3,
        "recipe": {"method__kind": "lora", "data__packing": True, "train__global_batch": 12, "train__epochs": 4},
    },
    "qlora checkpointed": {
        "shares": [6, 4, 2],
        "micro_batch": [4, 1, 2],
        "recipe": {
            "method__kind": "qlora",
            "train__gradient_checkpointing": True,
            "data__eval_fraction": 0.1,
            "train__epochs": 1,
        },
    },
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_and_three_uneven_ones_train_the_same(tmp_path: Path, model: Path, data: Path, case: str) -> None:
    shares, micro_batch, recipe = (CASES[case][key] for key in ("shares", "micro_batch", "recipe"))
    one = harness.make_run(tmp_path / "one", model, data, train__max_grad_norm=0.05, **recipe)
    three = harness.make_run(tmp_path / "three", model, data, train__max_grad_norm=0.05, **recipe)
    harness.train(one, 1, [12], micro_batch=5)
    harness.train(three, 1, shares, micro_batch=micro_batch)

    expected, found = harness.losses(one, 1), harness.losses(three, 1)
    assert len(expected) >= 4 and found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), f"loss of step {step}"
    last = max(expected)
    assert harness.relative_error(harness.weights(three, last), harness.weights(one, last)) < TOLERANCE

    lines = [harness.lines(three, 1, rank, "metrics.jsonl", "train") for rank in range(3)]
    for rank in range(3):
        assert [line["loss"] for line in lines[rank]] == [line["loss"] for line in lines[0]], (
            "every rank logs the same loss"
        )
        assert [line["grad_norm"] for line in lines[rank]] == [line["grad_norm"] for line in lines[0]]
    assert all(line["grad_norm"] > 0.05 for line in lines[0]), "clipping was active in every step"
    if "data__eval_fraction" in recipe:
        before_after = [
            [line["eval_loss"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "eval")] for run in (one, three)
        ]
        assert len(before_after[0]) == 2 and before_after[0][1] < before_after[0][0]
        assert before_after[1] == pytest.approx(before_after[0], rel=TOLERANCE)
    assert_every_sample_once_per_epoch(three, {1: last}, ranks=3, steps=last)


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


def test_the_first_loss_is_the_mean_over_all_tokens_of_the_batch(tmp_path: Path, model: Path, data: Path) -> None:
    """Against plain transformers: one row at a time, no padding, cross entropy summed by hand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = harness.make_run(tmp_path / "run", model, data, train__steps=2, train__epochs=None)
    harness.train(run, 1, [7, 5], micro_batch=2)
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
        for message in rows[index][
            "messages"
        ]:  # one token per byte, so characters are positions... but for the special tokens
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
    tmp_path: Path, model: Path, data: Path
) -> None:
    recipe = {"method__kind": "lora", "method__dropout": 0.2, "train__steps": 3, "train__epochs": None}
    recipe["parallel__micro_batch"] = 1
    one = harness.make_run(tmp_path / "one", model, data, **recipe)
    two = harness.make_run(tmp_path / "two", model, data, **recipe)
    harness.train(one, 1, [12], micro_batch=1)
    harness.train(two, 1, [9, 3], micro_batch=1)
    assert harness.losses(two, 1) == pytest.approx(harness.losses(one, 1), rel=TOLERANCE)
    assert harness.relative_error(harness.weights(two, 3), harness.weights(one, 3)) < TOLERANCE
    assert any("dropout" in line["message"] for line in harness.lines(one, 1, 0, "metrics.jsonl", "note"))


def test_the_gradient_reaches_every_adapter_of_a_quantized_model(tmp_path: Path, model: Path) -> None:
    """bitsandbytes repacks weights in eval mode on some CPUs, and then the backward pass stops there without a word.

    Compared with plain LoRA on the dequantized weights, before and after a forward pass in eval mode.
    """
    import bitsandbytes
    import torch
    from transformers import AutoModelForCausalLM

    from homelab.worker.model import add_adapters, load_model
    from homelab.worker.task import Task

    run = harness.make_run(
        tmp_path / "run", model, harness.write_jsonl(tmp_path / "d.jsonl", harness.chat_rows(1)), method__kind="qlora"
    )
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
    plain = add_adapters(plain, task.section("method"), task.seed)
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
