"""A plan that cannot run says so, with the first edit, and never sends anybody to launch; a quantised checkpoint is planned as it is held."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from homelab.controller.base.errors import InputError, MissingError
from homelab.controller.planning import plan as planning
from homelab.controller.planning import verdict
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.model import model_config
from homelab.controller.planning.render.time_table import duration
from tests import builders
from tests.controller.checks import healthy

BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def plan_of(*memories: Any, micro_batch: int = 1) -> Any:
    ranks = [builders.rank_plan(number, "tower", micro_batch=micro_batch, memory=memory) for number, memory in enumerate(memories)]
    return builders.plan(ranks, run="lora", nodes=())


def test_room_is_launched() -> None:
    found = verdict.of(plan_of(builders.memory(4.0, total_gib=8.0)), healthy.recipe())
    assert (found.exit_code, found.command) == (0, "launch")


def test_no_room_names_the_edit() -> None:
    found = verdict.of(plan_of(builders.memory(9.0, total_gib=8.0), micro_batch=512), healthy.recipe())
    assert (found.exit_code, found.command) == (1, "plan --fit") and "micro_batch = 256" in found.edit and "lacks 1.1 GB" in found.seen


@pytest.mark.parametrize(("kind", "micro_batch"), [("qlora", 512), ("lora", 128), ("full", 64)])
def test_the_first_edit_makes_it_fit(kind: str, micro_batch: int) -> None:
    recipe = healthy.recipe(
        model={"name": "HuggingFaceTB/SmolLM2-135M"}, method={"kind": kind}, train={"global_batch": 1024, "steps": 1, "learning_rate": 1e-4, "seq_len": 2048},
        parallel={"micro_batch": micro_batch, "strategy": "ddp"},
    )  # fmt: skip
    inputs = PlanInputs(healthy.gpu().cluster, recipe, {}, "r", 1)
    plan = planning.make(inputs)
    found = verdict.of(plan, recipe, inputs=inputs, offline=True)
    assert (found.exit_code, found.command) == (1, "plan --fit")
    edit = re.match(r"edit the recipe: \[parallel\] micro_batch = (\d+) \(was", found.edit)
    assert edit is not None and 'or "auto"' in found.edit, found.edit
    assert plan.time is not None and any('set micro_batch = "auto"' in line for line in plan.time.verdict)
    for value in (int(edit[1]), "auto"):
        edited = healthy.recipe(
            **recipe.model_dump(exclude_none=True, exclude={"parallel"}), parallel={"micro_batch": value, "strategy": "ddp"}
        )
        after = dataclasses.replace(inputs, recipe=edited)
        assert verdict.of(planning.make(after), edited, inputs=after).exit_code == 0


@pytest.mark.parametrize(
    ("name", "offline", "code"),
    [("Qwen/Qwen3-88B", True, 1), ("org/unknown", False, 1), ("/models/there", True, 0), ("/models/there", False, 1)],
)
def test_what_could_not_be_judged_is_never_followed_by_launch(name: str, offline: bool, code: int) -> None:
    found = verdict.of(plan_of(None), healthy.recipe(model={"name": name}), offline=offline)
    assert found.exit_code == code and found.command == "preflight" and found.title == "Not judged" and name in found.seen
    assert ("did you mean" in found.edit) == (name == "Qwen/Qwen3-88B")


@pytest.mark.parametrize(
    ("name", "others", "meant"),
    [
        ("qwen/qwen2.5-7b-instrct", [], "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen2.5-7B", [], "Qwen/Qwen2.5-7B"),
        ("meta-lama/Llama-3.1-8B", [], "meta-llama/Llama-3.1-8B"),
        ("org/minne", ["org/mine"], "org/mine"),
        ("/models/qwen3-8", ["/models/qwen3-8b", "/models/x"], "/models/qwen3-8b"),
        ("no/such-model", [], ""),
        ("/models/a", [], ""),
    ],
)
def test_a_slip_is_told_what_was_meant(name: str, others: list[str], meant: str) -> None:
    found = verdict.of(plan_of(None), healthy.recipe(model={"name": name}), others=others, offline=True)
    assert found.edit.startswith(f'edit the recipe: [model] name = "{meant}"') if meant else "did you mean" not in found.edit
    assert "homelab preflight RECIPE" in found.edit


@pytest.mark.parametrize(("kind", "code"), [(InputError, 1), (MissingError, 0)])
def test_data_that_cannot_be_read_comes_first_and_may_still_come(kind: type[InputError], code: int) -> None:
    blocked = kind("in any words", where="r.toml, key data.train", hint="put it there")
    found = verdict.of(plan_of(builders.memory(4.0, total_gib=8.0)), healthy.recipe(), blocked)
    assert found.exit_code == code and found.edit == "put it there" and found.command == "preflight"


@pytest.mark.parametrize(
    ("method", "said", "held"),
    [
        ({"kind": "lora"}, BNB4, "nf4"),
        ({"kind": "qlora"}, BNB4, "nf4"),
        ({"kind": "lora"}, BNB8, "int8"),
        ({"kind": "lora"}, None, None),
        ({"kind": "lora"}, {"quant_method": "fp8"}, None),
        ({"kind": "lora"}, {"quant_method": "mxfp4"}, None),
    ],
)
def test_a_quantised_checkpoint_is_planned_as_it_is_held(method: dict[str, Any], said: Any, held: str | None) -> None:
    recipe: Any = healthy.recipe(method=method)
    assert model_config.as_held(recipe, {**healthy.LLAMA, "quantization_config": said}).method.quantisation == held


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"kind": "lora"}, {"quant_method": "gptq", "bits": 4}),
        ({"kind": "qlora"}, {"quant_method": "awq", "bits": 4}),
        ({"kind": "lora"}, {"quant_method": "quip9"}),
        ({"kind": "full"}, BNB4),
        ({"kind": "qlora"}, BNB8),
        ({"kind": "qlora"}, {"quant_method": "fp8"}),
    ],
)
def test_what_cannot_be_trained_has_no_plan(method: dict[str, Any], said: Any) -> None:
    recipe: Any = healthy.recipe(method=method)
    with pytest.raises(InputError, match="quantised already") as refused:
        model_config.as_held(recipe, {"text_config": {**healthy.LLAMA, "quantization_config": said}})
    assert refused.value.hint


def test_long_times_are_years() -> None:
    assert [duration(days * 86_400) for days in (3, 500, 2560)] == ["3 days", "500 days", "7 years"]
