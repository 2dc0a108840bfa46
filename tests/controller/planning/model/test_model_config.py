"""A config.json that no training can come of is refused before any formula counts it, in one sentence for its kind; what no formula knows says so."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning import verdict
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.model import model_config
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

HUGE = 10**400
WITHOUT = {"found": False, "config": None, "files": {}, "path": None}


def planned(config: dict[str, Any] | None = None, name: str = "org/mine", *, on_nodes: bool = False) -> Any:
    """The plan of a model with this config.json, on the nodes or on this machine alone."""
    seen = healthy.gpu()
    for node in healthy.NAMES:
        seen = healthy.with_facts(seen, node, model={**WITHOUT, "config": config if on_nodes else None})
    recipe = healthy.recipe(model={"name": name})
    plan = make(seen, recipe, config=None if on_nodes else config)
    return plan, verdict.of(plan, recipe, inputs=PlanInputs(seen.cluster, recipe, seen.facts, "r", 1, config=None if on_nodes else config))


ABSURD: dict[str, dict[str, Any]] = {
    "10^400 heads": {"num_attention_heads": HUGE}, "10^400 layers": {"num_hidden_layers": HUGE}, "a billion layers": {"num_hidden_layers": 10**9},
    "less than none": {"hidden_size": -576}, "none": {"vocab_size": 0}, "a word": {"intermediate_size": "1536"}, "yes": {"num_hidden_layers": True},
    "no number": {"hidden_size": float("nan")}, "no end": {"hidden_size": float("inf")}, "a list": {"num_key_value_heads": [3, 3]}, "a table": {"head_dim": {"a": 1}},
    "more heads than features": {"num_attention_heads": 5000, "num_key_value_heads": 1, "head_dim": None}, "more keys than queries": {"num_key_value_heads": 64},
    "10^400 positions": {"max_position_embeddings": HUGE}, "inside": {"model_type": "gemma3", "text_config": {"num_hidden_layers": HUGE}},
    "another kind": {"model_type": "mamba", "num_hidden_layers": HUGE},
}  # fmt: skip


@pytest.mark.parametrize("on_nodes", [True, False])
@pytest.mark.parametrize("case", ABSURD)
def test_numbers_that_no_model_has_are_refused_at_once(case: str, on_nodes: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(InputError) as refused:
        planned({**builders.LLAMA, **ABSURD[case]}, on_nodes=on_nodes)
    assert refused.value.message.startswith("config.json of org/mine") and len(refused.value.message) < 200
    assert "copy the model's folder again" in refused.value.hint and refused.value.where
    assert time.monotonic() - begin < 2


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"text_config": value, "a": 1}
    return value


@pytest.mark.parametrize(
    "keys",
    [
        {"text_config": nested(300)},
        {"rope_scaling": nested(300)},
        {"quantization_config": [1]},
        {"text_config": "x"},
        {"architectures": {}},
        {"tie_word_embeddings": "no"},
        {"rope_scaling": {"factor": HUGE}},
        {"num_experts": HUGE},
        {"sliding_window": HUGE},
        {"logits_scaling": HUGE},
        {"layer_types": [[]] * 9},
    ],
    ids=lambda keys: f"{next(iter(keys))}",
)
@pytest.mark.parametrize("kind", ["llama", "granite", "mamba"])
def test_other_odd_keys_end_in_a_plan(keys: dict[str, Any], kind: str) -> None:
    plan, judged = planned({**builders.LLAMA, "model_type": kind, **keys})
    assert json.loads(plan.model_dump_json())["ranks"] and judged.runs is (kind != "mamba")


REFUSED = {
    "bert-base-uncased": "a model of type bert is an encoder", "google/flan-t5-base": "reads with an encoder and writes with a decoder",
    "Qwen/Qwen2.5-VL-7B-Instruct": "not a causal language model that transformers can build (type qwen2_5_vl)", "Qwen/Qwen3-8B-GGUF": "holds GGUF files",
    "Qwen/Qwen3-8B-AWQ": "quantised already (AWQ in 4 bits)", "TheBloke/Some-13B-GPTQ": "quantised already (GPTQ in 4 bits)", "unsloth/phi-4-GGUF": "perhaps unsloth/phi-4",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_trained_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(InputError) as refused:
        planned(name=name)
    assert REFUSED[name] in f"{refused.value.message} {refused.value.hint}" and "edit the recipe" in refused.value.hint


UNKNOWN = {
    "meta-llama/Llama-3.2-11B-Vision": "has a part for images or sounds (mllama)", "state-spaces/mamba-130m-hf": "keeps a state in place of attention (mamba)",
    "gpt2": "is of a kind that the formulas of the planner do not know (gpt2)",
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_formula_counts_says_so_and_is_not_launched(name: str) -> None:
    _, judged = planned(name=name)
    assert UNKNOWN[name] in judged.seen and (judged.exit_code, judged.title) == (1, "Not judged") and "homelab" in judged.edit


def test_all_weights_of_a_model_that_sees_are_the_reason_where_they_are() -> None:
    seen = healthy.gpu()
    for node in healthy.NAMES:
        seen = healthy.with_facts(seen, node, model=WITHOUT)
    for kind in ("lora", "full"):
        recipe = healthy.recipe(model={"name": "google/gemma-3-4b-it"}, method={"kind": kind})
        judged = verdict.of(make(seen, recipe), recipe, inputs=PlanInputs(seen.cluster, recipe, seen.facts, "r", 1))
        assert (judged.title == "Not judged" and "where all weights are trained" in judged.seen) == (kind == "full")


def test_a_list_that_names_experts_is_the_reason_where_it_is() -> None:
    seen = healthy.gpu()
    for node in healthy.NAMES:
        seen = healthy.with_facts(seen, node, model=WITHOUT)
    recipe = healthy.recipe(model={"name": "Qwen/Qwen3-30B-A3B"}, method={"kind": "qlora", "targets": ["q_proj", "gate_proj"]})
    plan = make(seen, recipe)
    judged = verdict.of(plan, recipe, inputs=PlanInputs(seen.cluster, recipe, seen.facts, "r", 1))
    assert judged.title == "Not judged" and "has adapters on routed experts" in judged.seen
    assert any("shares go by speed alone" in warning for warning in plan.warnings)


def test_a_node_that_has_the_model_has_the_last_word_on_its_kind() -> None:
    _, judged = planned({"model_type": "qwen2_5_vl", "vision_config": {}}, on_nodes=True)
    assert "has a part for images" in judged.seen
    with pytest.raises(InputError, match="not a causal language model"):
        planned({"model_type": "qwen2_5_vl", "vision_config": {}})


def test_a_recipe_is_planned_as_before() -> None:
    recipe = healthy.recipe()
    assert isinstance(recipe, TrainRecipe)
    model_config.refuse_numbers("org/mine", builders.LLAMA)
    assert planned(builders.LLAMA)[1].exit_code == 0
