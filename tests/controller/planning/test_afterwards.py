"""The plan refuses what could not be used afterwards, and says what will not be made of the result."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from tests import builders

NAMES = builders.NAMES
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


def plan_of(config: dict[str, Any], **method: Any) -> Any:
    recipe = builders.recipe(method={"kind": "lora", **method})
    facts = {}
    for name in NAMES:
        known = builders.facts(name, recipe=recipe)
        assert known.model is not None
        facts[name] = known.model_copy(update={"model": known.model.model_copy(update={"config": {**builders.LLAMA, **config}})})
    return builders.make_plan(builders.cluster(), recipe, facts)


@pytest.mark.parametrize(("config", "method", "edit"), [
    (GPTQ, {}, "[model] name"), (GPTQ, {"kind": "qlora"}, "[model] name"), (GPTQ, {"kind": "full"}, "[model] name"),
    (BNB, {"kind": "full"}, 'kind = "lora"'), (BNB, {"base": "8bit"}, "without base"),
])  # fmt: skip
def test_quantised_files_that_the_method_cannot_train_have_no_plan(config: dict[str, Any], method: dict[str, Any], edit: str) -> None:
    with pytest.raises(InputError, match="quantised already") as refused:
        plan_of(config, **method)
    assert edit in str(refused.value.hint) and "config.json" in refused.value.where


@pytest.mark.parametrize("config", [{}, BNB])
def test_what_can_be_trained_has_a_plan_without_a_word(config: dict[str, Any]) -> None:
    assert not [line for line in plan_of({**config, "architectures": ["LlamaForCausalLM"]}).warnings if "GGUF" in line]


@pytest.mark.parametrize(("config", "targets", "word"), [
    ({"architectures": ["OPTForCausalLM"]}, "all-linear", "does not know OPTForCausalLM"),
    ({"architectures": ["Gemma2ForCausalLM"]}, ["q_proj", "lm_head"], "no separate head"),
])  # fmt: skip
def test_what_becomes_no_gguf_file_is_said_before_the_night(config: dict[str, Any], targets: Any, word: str) -> None:
    assert any("no GGUF file" in line and word in line for line in plan_of(config, targets=targets).warnings)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [None], [7], {}])
def test_a_config_that_names_no_class_is_no_warning(names: Any) -> None:
    assert not [line for line in plan_of({"architectures": names}).warnings if "GGUF" in line]
