"""Grouped queries on cards that do not take them: keys are repeated, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.integrations import sdpa_attention

from homelab.controller.base import hardware
from homelab.controller.planning.memory.attention import repeats_keys
from homelab.worker.model import build as worker_model
from homelab.worker.model import grouped_queries
from tests.worker import harness


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    yield


def asked(llama: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, set[tuple[int, int, bool]]]:
    """The logits, and (heads of queries, heads of keys, enable_gqa) of every call of the kernel."""
    calls = set()
    really = torch.nn.functional.scaled_dot_product_attention

    def kernel(query: Any, key: Any, value: Any, **options: Any) -> Any:
        calls.add((query.shape[1], key.shape[1], bool(options.get("enable_gqa"))))
        return really(query, key, value, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
        return llama(input_ids=torch.arange(1, 40).unsqueeze(0)).logits, calls


def test_on_turing_keys_are_repeated_and_the_numbers_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    assert not grouped_queries.repeat_keys("bf16", (8, 6)) and not grouped_queries.repeat_keys("fp16", (8, 0))
    before, grouped = asked(llama, monkeypatch)
    assert grouped == {(4, 2, True)}
    assert grouped_queries.repeat_keys("fp16", (7, 5))
    after, repeated = asked(llama, monkeypatch)
    assert repeated == {(4, 4, False)}
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)


def test_the_worker_asks_the_card_that_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    task = harness.task_of(Path(), plan={"precision": "fp16", "device": "cuda"}, method__kind="lora")

    class Reached(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(worker_model, "_load_base", stop)
    with pytest.raises(Reached):
        worker_model.load_model(task, "none", lambda text: None)
    assert sdpa_attention.use_gqa_in_sdpa(None, torch.zeros(1, 1), torch.zeros(1, 1)) is False


@pytest.mark.parametrize(
    ("card", "precision", "expected"),
    [("Tesla T4", "fp16", True), ("RTX 3070 Ti", "bf16", False), ("RTX 3070 Ti", "fp32", True), ("a card of 2030", "bf16", True)],
)
def test_the_plan_knows_it(card: str, precision: str, expected: bool) -> None:
    """Of an unknown generation it counts as one that repeats them: that is more memory."""
    capability = hardware.generation(card)
    assert repeats_keys("cuda", precision, capability) is expected and not repeats_keys("cpu", precision, capability)
