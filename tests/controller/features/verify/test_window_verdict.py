"""When a window agrees: its losses, its rows, its rates and its weights, each beside its bound; and the words of the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homelab.controller.features.verify import window_verdict
from homelab.controller.features.verify.step_record import Window
from homelab.controller.features.verify.window_verdict import WindowCompared, WindowMachines, WindowResult, answer, judged
from homelab.controller.planning.advice.reproducibility import LawLimit, limit_of
from tests import builders
from tests.controller.features.verify.test_step_record import Lines, chained, record, written

pytestmark = pytest.mark.timeout(60)
WINDOW = Window(begin=4, end=8)


def again(changes: dict[str, Any] | None = None, *, step: int = 6) -> Lines:
    """The lines of the window, those of `step` changed."""
    lines = [line for line in written() if line["step"] > 4 or line["kind"] == "start"]
    return chained([{**line, **(changes or {})} if line["kind"] == "train" and line["step"] == step else line for line in lines])


def judge(
    lines: Lines, *, apart: float | None = 0.0, precision: str = "fp32", versions: dict[str, str] | None = None, window: Window = WINDOW,
    devices: tuple[str, ...] = ("CPU",), before: Lines | None = None, limit: LawLimit | None = None,
) -> WindowResult:  # fmt: skip
    weights = None if apart is None else {"node": "tower", "apart": apart, "way": 2.0, "most": apart}
    compared = WindowCompared.model_validate({"weights": weights, "versions": versions or {}, "devices": devices})
    machines = WindowMachines(run="verify", nodes=("tower",), strategy="ddp", precision=precision)
    return judged(record(before or written()), window, record(lines), compared, machines, limit)


def test_rounding_agrees_and_more_does_not_and_the_step_is_named() -> None:
    loss = written()[7]["loss"]
    assert judge(again()).verdict == "agrees" and judge(again()).loss_apart == 0.0
    near = judge(again({"loss": loss * (1 + 2e-7)}), apart=1e-6)
    assert near.verdict == "agrees" and near.loss_apart == pytest.approx(2e-7, rel=0.01) and near.weights_apart == 5e-7
    assert judge(again({"loss": loss * 1.0001})).because.startswith("step 6 does not: its loss is 0.0001 apart")
    assert judge(again({"loss": loss * 1.0001}), precision="bf16").verdict == "agrees"
    assert judge(again({"batch": "0" * 16})).because == "step 6 does not: the recipe gives it other rows"
    assert judge(again({"learning_rate": 1.01e-3})).because == "step 6 does not: the recipe gives it another learning rate"
    far = judge(again(), apart=0.02)
    assert far.verdict == "differs" and far.because.startswith("the weights after step 8 do not: they are 0.01 of their way apart")
    uncompared = judge(again(), apart=None)
    assert "were not compared" in uncompared.because and uncompared.verdict == "not computed"
    assert judge(again({"batch": "0" * 16}), apart=None).verdict == "differs"
    assert judge([line for line in again() if line["step"] != 7]).because == "step 7 was not computed"
    assert judge(again({"passes": "0101"})).same_passes is False and judge(again()).same_passes is True
    assert judge(again({"passes": "0101"})).verdict == "agrees", "who computes what is no part of the law"


def test_in_bf16_the_same_passes_on_the_same_processors_tell_and_others_do_not_accuse() -> None:
    rate: dict[str, Any] = {"apart": 0.02, "precision": "bf16"}  # 1 % of the way: a rate of 1 % more, or the rounding of other passes
    assert judge(again(), **rate).verdict == "differs"
    for other in (
        judge(again({"passes": "0101"}), **rate),
        judge(again(), devices=("NVIDIA GeForce RTX 3090",), **rate),
        judge(again(), devices=("CPU", "NVIDIA GeForce RTX 3090"), **rate),
        judge(again(), versions={"torch": "2.14.0"}, **rate),
        judge(again(), before=chained([{**line, "attempt": 2} if line["step"] == 8 else line for line in written()]), **rate),
        judge(again({"loss": written()[7]["loss"] * 1.005, "passes": "0101"}), precision="bf16"),
    ):
        assert other.verdict == "unclear" and "may round so in bf16" in other.because
    assert judge(again({"passes": "0101"}), apart=1e-3, precision="bf16").verdict == "agrees", "as near as this no forgery is"
    assert judge(again({"passes": "0101"}), apart=0.7, precision="bf16").verdict == "differs"
    assert judge(again({"passes": "0101"}), apart=1e-3).verdict == "differs", "fp32 needs no such room"


@pytest.mark.parametrize(
    ("sections", "config", "is_repeatable"),
    [
        ({"method": {"kind": "lora", "rank": 8, "dropout": 0.1}}, {}, True),
        ({"method": {"kind": "full", "model_dropout": True}}, {}, True),
        ({"train": {"optimizer": "adamw_8bit"}}, {}, True),
        ({}, {"num_local_experts": 8, "output_router_logits": True}, True),
        ({"parallel": {"compress": "bf16"}}, {}, False),
        ({"method": {"kind": "full"}, "parallel": {"compress": "powersgd"}}, {}, False),
    ],
)
def test_a_recipe_that_the_law_does_not_hold_to_the_last_digit_accuses_nobody(
    sections: dict[str, Any], config: dict[str, Any], is_repeatable: bool
) -> None:
    base = builders.recipe()
    limit = limit_of(builders.recipe(**{name: {**getattr(base, name).__dict__, **keys} for name, keys in sections.items()}), config)
    assert limit is not None and limit_of(base, {}) is None
    loss = written()[7]["loss"]
    moved = again({"loss": loss * 1.05, "passes": "0101"})
    found = judge(moved, apart=0.9, limit=limit)
    assert (
        found.verdict == "unclear" and found.because == f"{limit.text}, and a change may hide there" and judge(moved).verdict == "differs"
    )
    assert judge(again({"loss": loss * 1.05}), devices=("NVIDIA GeForce RTX 3090",), limit=limit).verdict == "unclear"
    assert judge(again({"loss": loss * 1.05}), limit=limit).verdict == ("differs" if is_repeatable else "unclear")
    assert judge(again({"batch": "0" * 16, "passes": "0101"}), limit=limit).verdict == "differs", "rows and rates are exact with any recipe"
    assert judge(again({"passes": "0101"}), limit=limit).verdict == "agrees"


def test_adapters_that_powersgd_does_not_compress_are_judged_as_others() -> None:
    narrow = {**builders.recipe().method.__dict__, "kind": "lora", "rank": 8}
    assert limit_of(builders.recipe(method=narrow, parallel={"compress": "powersgd"}), {}) is None


def test_another_torch_is_said_and_compared_all_the_same() -> None:
    found = judge(again(), versions={"torch": "2.14.0", "peft": "0.21"})
    assert found.verdict == "agrees" and found.notes == ("torch is 2.14.0 now, and was 2.13.0: compared all the same",)


def test_a_window_from_the_beginning_has_the_recipe_and_the_rows_of_the_record() -> None:
    lines = written()
    assert judge(lines, window=Window(begin=0, end=4)).verdict == "agrees"
    lines[0]["recipe_hash"] = "r2"
    assert judge(chained(lines), window=Window(begin=0, end=4)).because == "the recipe is another one than the record names"


def test_weights_that_do_not_move_must_be_the_same() -> None:
    still = window_verdict.Apart(node="tower", apart=0.0, way=0.0, most=0.0)
    assert still.part == 0.0 and window_verdict.Apart(node="tower", apart=1e-9, way=0.0, most=1e-9).part == 1.0


@pytest.mark.parametrize(
    "content",
    [
        {"weights": {"node": "a", "apart": float("nan"), "way": 1, "most": 0}},
        {"weights": {"node": "a", "apart": -1, "way": 1, "most": 0}},
        {"weights": [1]},
        {"versions": {"torch": "x" * 1000}},
    ],
)
def test_a_node_cannot_say_a_distance_that_is_none(content: Any) -> None:
    with pytest.raises(ValueError, match="validation error"):
        WindowCompared.model_validate(json.loads(json.dumps(content)))


def test_the_answer_says_what_agrees_and_never_that_it_is_proven() -> None:
    good, bad = judge(again()), judge(again({"batch": "0" * 16}))
    gone = WindowResult(window=Window(begin=8, end=12), verdict="not computed", because="no node that answers has the checkpoint of step 8")
    said = [answer("r", [], [good], "fp32"), answer("r", [], [good], "bf16"), answer("r", [], [good, bad], "fp32"), answer("r", [], [good, gone], "fp32"),
            answer("r", [], [good, judge(again({"passes": "0101"}), apart=0.02, precision="bf16")], "bf16"),
            answer("r", ["the line of step 7 was changed"], [], "fp32"), answer("r", [], [], "fp32")]  # fmt: skip
    assert said == [
        "r agrees within fp32 rounding: steps 4..8",
        "r agrees within bf16: steps 4..8",
        "r does not agree: step 6 does not: the recipe gives it other rows",
        "r: steps 8..12 were not computed again: no node that answers has the checkpoint of step 8",
        "r: steps 4..8 are unclear: other passes or processors than the record's may round so in bf16, and a small change may hide there",
        "r: the line of step 7 was changed",
        "r: the record is whole; nothing of it was computed again",
    ]
