"""A config.json may hold anything at any key: who reads it for a plan refuses it in words, and never ends otherwise."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.model import families, model_config
from homelab.shared.law import model_kinds, usable
from tests.controller.checks import healthy

CONFIG: dict[str, Any] = {
    **healthy.LLAMA, "architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}, "is_encoder_decoder": False, "torch_dtype": "bfloat16",
    "text_config": {"model_type": "llama", "hidden_size": 4},
}  # fmt: skip
ODD = (None, True, -1, 10**30, float("nan"), "", [], {}, [None], [[1]], {"a": 1}, "x" * 20_000, [0] * 1000)
READERS = {
    "numbers": lambda config: model_config.refuse_numbers("m", config), "kind": lambda config: model_config.refuse_kind("m", config),
    "why": model_config.why_no_formula, "shape": families.from_config, "law": model_kinds.refusal, "checkpoint": usable.checkpoint_of,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("key", CONFIG)
def test_an_odd_value_is_refused_in_words_or_passed_over(reader: str, key: str) -> None:
    for value in ODD:
        changed = [{**CONFIG, key: value}]
        if key == "text_config":
            changed += [{**CONFIG, key: {**CONFIG[key], inner: value}} for inner in CONFIG[key]]
        for config in changed:
            with contextlib.suppress(InputError):
                READERS[reader](config)
