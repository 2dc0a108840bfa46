"""Runs side by side: speed-up, and whether they are one training."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from homelab.controller.config.cluster import EnergyPrice
from homelab.controller.facts.reading import read
from homelab.controller.features.bench import side_by_side
from homelab.controller.features.bench.side_by_side import RunComparison, Side
from homelab.controller.features.report.report_builder import RunAbout, Sources
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import CardJoules
from tests import builders


def side(run: str, losses: Mapping[int, float] | None = None, **changes: Any) -> Side:
    known: dict[str, Any] = {
        "run": run, "state": "done", "recipe_hash": "a" * 16, "settings": {"train.steps": "3"}, "strategy": "ddp", "nodes": ("tower",), "precision": "fp32",
        "measured": None, "alone_tokens_per_s": None, "kwh_per_million_tokens": None, "losses": losses or {1: 3.0, 2: 2.0, 3: 1.0},
    }  # fmt: skip
    return Side(**{**known, **changes})


def sources(run: str, ranks: int, step_s: float) -> Sources:
    """A run of five steps on nodes of one rank each."""
    names = builders.NAMES[:ranks]
    plan = builders.make_plan(builders.cluster(names), builders.recipe(), {}, run=run)
    metrics = [
        read(Metric, {
            "kind": "train", "attempt": 1, "rank": rank, "node": names[rank], "step": step, "loss": 4.0 / step, "tokens": 120 // ranks, "step_s": step_s,
            "communication_s": 0.1, "time": float(step), "memory_bytes": 2**30,
        })
        for step in range(1, 6) for rank in range(ranks)
    ]  # fmt: skip
    return Sources(
        run=run, state="done", now=0.0, about=RunAbout(recipe_hash="b" * 16), recipe=builders.recipe(), plans={1: plan}, metrics=metrics
    )


def second(first: Side, other: Side) -> RunComparison:
    return side_by_side.compare([first, other])[1]


def test_one_machine_against_three_from_what_the_ranks_wrote() -> None:
    alone, together = (
        side_by_side.side_of(sources(name, ranks, step_s), warmup=1) for name, ranks, step_s in (("one", 1, 3.0), ("three", 3, 1.25))
    )
    assert alone.measured is not None and alone.measured.steps == 4 and alone.measured.tokens_per_s == pytest.approx(40)
    beside = second(alone, together)
    assert beside.speed_up == pytest.approx(2.4) and beside.common_steps == 5 and beside.curve_difference == 0.0 and beside.is_same


def test_rounding_is_one_training_and_more_is_said_loudly() -> None:
    first = side("a")
    rounding = second(first, side("b", {1: 3.0, 2: 2.0 * (1 + 5e-5), 3: 1.0}))
    other = second(first, side("c", {1: 3.0, 2: 2.01, 3: 1.0}))
    assert rounding.is_same is True and other.is_same is False and other.curve_difference == pytest.approx(5e-3)
    assert second(side("a", precision="bf16"), side("c", {2: 2.01}, precision="bf16")).is_same is True
    said = side_by_side.sentences(side_by_side.compare([first, rounding.side, other.side]))
    assert "is the same training as a" in said[0] and "c HAS A DIFFERENT CURVE from a" in said[1] and "over 3 common steps" in said[1]


def test_another_recipe_is_another_training_and_its_settings_are_named() -> None:
    other = second(side("a"), side("b", recipe_hash="c" * 16, settings={"train.steps": "3", "train.learning_rate": "0.002"}))
    assert other.is_same is None and other.differs == ("train.learning_rate: not set there, 0.002 here",)
    assert second(side("a"), side("b", recipe_hash="c" * 16)).differs == ("the content of its data",)


def test_runs_without_a_common_step_or_a_figure_have_empty_cells() -> None:
    compared = side_by_side.compare([side("a"), side("b", {9: 1.0})])
    assert compared[1].curve_difference is None and compared[1].speed_up is None
    assert side_by_side.sentences(compared) == ["b and a have no step in common yet"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*side_by_side.tables(compared, EnergyPrice(), console.width))
    assert "b" in console.export_text()


def test_the_cost_is_in_kwh_and_with_a_price_in_money() -> None:
    costly = side("a", kwh_per_million_tokens=0.5)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*side_by_side.tables(side_by_side.compare([costly]), EnergyPrice(price_per_kwh=0.3, currency="EUR"), console.width))
    assert "0.5 kWh, 0.15 EUR" in console.export_text()


def test_the_cost_is_that_of_the_cards_that_trained_and_of_all_of_them() -> None:
    """5 steps of 120 tokens: 600. A card that cluster.toml leaves out is measured as well."""
    ranks = [builders.rank_plan(number, name, card=f"GPU-{name}") for number, name in enumerate(builders.NAMES[:2])]
    known = dataclasses.replace(sources("two", 2, 1.0), plans={1: builders.plan(ranks)})
    own, other = (
        [CardJoules(index=0, uuid=f"GPU-{name}", joules=3.6e6, measured_s=60.0), CardJoules(index=1, uuid="GPU-spare", joules=spare_j)]
        for name, spare_j in zip(builders.NAMES[:2], (9e9, None), strict=True)
    )
    first, second_place = ((1, name) for name in builders.NAMES[:2])
    costs = side_by_side.side_of(dataclasses.replace(known, energy={first: own, second_place: other}), 1).kwh_per_million_tokens
    assert costs == pytest.approx(2.0 / (600 / 1e6))
    assert side_by_side.side_of(dataclasses.replace(known, energy={first: own}), 1).kwh_per_million_tokens is None, "one node is off"


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_word_of_the_table_is_broken_and_no_run_is_lost(width: int) -> None:
    names = [f"2026-11-25-09{number:02}-my-training" for number in range(5)]
    measured = [side_by_side.side_of(sources(name, 1 + number % 3, 1.0), warmup=1) for number, name in enumerate(names)]
    console = Console(width=width, record=True, file=io.StringIO())
    for table in side_by_side.tables(side_by_side.compare(measured), EnergyPrice(), width):
        console.print(table)
    said = console.export_text()
    assert all(said.count(name) == 1 for name in names) and "efficiency" not in said, "nobody has measured what they do alone"
    assert {"tokens/s", "strategy", "speed-up"} <= set(said.split()) and max(map(len, said.splitlines())) <= width


def test_of_runs_judged_by_the_same_rows_the_best_is_named_first_with_what_it_does_otherwise() -> None:
    def judged(run: str, rate: str, held_out: Mapping[int, float], **others: str) -> Side:
        return side(
            run, recipe_hash=run * 16, settings={"train.learning_rate": rate, "data.train": "a.jsonl", **others}, held_out=dict(held_out)
        )

    slow, fast = judged("a", "1e-04", {10: 2.5, 20: 2.0}), judged("b", "1e-03", {10: 1.6, 20: 1.9})
    said = side_by_side.sentences(side_by_side.compare([slow, fast, side("c")]))
    assert (
        said[0]
        == "b has learned most with train.learning_rate = 1e-03: its held-out loss is 1.6000 in step 10; a follows with 2.0000, +25.0%"
    )
    assert "b is a different training from a" in said[1] and len(said) == 3
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*side_by_side.tables(side_by_side.compare([slow, fast]), EnergyPrice(), console.width))
    assert re.search(r"held-out loss +2.0000 +1.6000", console.export_text())
    for other in (
        {"data.train": "b.jsonl"},
        {"data.train (content)": "c"},
        {"model.name": "x"},
        {"train.seed": "1"},
        {"objective.kind": "dpo"},
    ):
        said = side_by_side.sentences(side_by_side.compare([slow, judged("b", "1e-03", {10: 1.6}, **other)]))
        assert said[0].startswith("Their held-out losses cannot be compared")
    alone = side_by_side.sentences(side_by_side.compare([slow, side("c")]))
    assert len(alone) == 1 and "learned most" not in alone[0]


def test_a_side_knows_what_its_data_holds_and_the_held_out_losses_that_were_not_undone() -> None:
    known = sources("one", 1, 1.0)
    lines = [
        read(Metric, {"kind": "eval", "attempt": 1, "rank": 0, "step": step, "eval_loss": loss, "time": 9.0})
        for step, loss in ((2, 3.0), (4, 2.5), (5, math.nan), (6, 0.0), (7, math.inf))
    ]
    about = RunAbout.model_validate({"recipe_hash": "b" * 16, "data": {"train": {"sha256": "e" * 64, "path": "/x"}, "eval": None}})
    one = side_by_side.side_of(dataclasses.replace(known, metrics=[*known.metrics, *lines], about=about), warmup=1)
    assert one.held_out == {2: 3.0, 4: 2.5, 6: 0.0} and one.best_step == 6 and one.settings["data.train (content)"] == "e" * 12
    assert RunAbout.model_validate({"data": {"train": 3}}).data is None, "run.json may be spoilt"
