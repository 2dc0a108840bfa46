"""Transformers or Unsloth: what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.checks.evidence import Evidence
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model import families
from homelab.shared.protocol.memory_items import LOGITS
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make, why

ONE = healthy.NAMES[:1]


def said(seen: Evidence, **method: Any) -> tuple[str, str]:
    return why(make(seen, healthy.recipe(method={"kind": "lora", **method})), "trainer")


def test_what_the_recipe_says_is_what_trains() -> None:
    assert said(healthy.gpu(), backend="unsloth") == ("unsloth", "the recipe says so")
    assert said(healthy.gpu(), backend="transformers") == ("transformers", "the recipe says so")
    whole = make(healthy.gpu(), healthy.recipe(method={"kind": "full"}))
    assert not [choice for choice in whole.choices if choice.subject == "trainer"]


@pytest.mark.parametrize(
    ("seen", "method", "words"),
    [
        (healthy.cpu(), {}, "with one CUDA card: its kernels are for cards"),
        (healthy.gpu(), {}, "with one CUDA card only, and here are 3"),
        (healthy.gpu(names=ONE), {"dropout": 0.1}, "without dropout: 0.1 turns its fused kernels off"),
        (healthy.gpu(names=ONE), {}, "there is none at ~/.homelab/unsloth/bin/python"),
    ],
)
def test_auto_is_transformers_and_says_when_it_would_not_be(seen: Evidence, method: dict[str, Any], words: str) -> None:
    value, because = said(seen, **method)
    assert value == "transformers" and because.startswith("auto; Unsloth would be used with") and words in because


def test_auto_on_one_card_names_the_environment_that_is_there() -> None:
    seen = healthy.with_facts(healthy.gpu(names=ONE), ONE[0], python={"unsloth": "2026.10.9"})
    value, because = said(seen)
    assert value == "transformers" and 'backend = "unsloth" (2026.10.9 is there' in because


def test_offline_nobody_has_looked_for_it() -> None:
    made = make(healthy.gpu(names=ONE), healthy.recipe(method={"kind": "lora"}), offline=True)
    assert "it was not looked for at" in why(made, "trainer")[1]


def test_its_loss_comes_in_chunks() -> None:
    """Of a small model with a large vocabulary all logits at once would be most of the peak."""
    shape = families.from_config(healthy.LLAMA)
    assert shape is not None

    def logits(**method: Any) -> int:
        train = {"global_batch": 12, "epochs": 1, "learning_rate": 1e-3, "fused_loss": False}
        recipe = healthy.recipe(method={"kind": "lora", **method}, train=train)
        items = rank_memory.estimate(shape, recipe.method, recipe.train, RankSetup("bf16", "cuda", micro_batch=8))
        return sum(item.size_bytes for item in items if item.name == LOGITS)

    assert logits(backend="unsloth") < logits() / 4
