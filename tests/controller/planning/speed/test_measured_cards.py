"""What others measured on a card stands in front of its data sheet and behind one's own runs; a row that no card can have done is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import card_table as table
from homelab.controller.base.hardware import lookup
from homelab.controller.planning import plan as planning
from homelab.controller.planning.speed import measured_cards
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Moved, Table
from homelab.controller.planning.types import Plan
from homelab.shared.law.speed import Speed
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import all_measured, belief

LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
ROW: dict[str, Any] = {
    "card": "NVIDIA GeForce RTX 5070 Ti", "memory_bytes": 16303 << 20, "driver": "580.95.05", "power_limit_w": 300.0, "power_limit_default_w": 300.0, "torch": "2.13.0+cu130",
    "source": "somebody", "method": "lora", "precision": "bf16", "shape": LLAMA_7B, "gradient_checkpointing": True, "seq_len": 2048, "micro_batch": 4,
    "tokens_per_s": 1500.0, "peak_bytes": 15 << 30,
}  # fmt: skip


def row(**changes: Any) -> MeasuredCard:
    found = table.parse(json.dumps({**ROW, **changes}))
    assert isinstance(found, MeasuredCard), found
    return found


def of_guess(part: float, **changes: Any) -> MeasuredCard:
    """A row that is so many times as fast as the data sheet's guess of it."""
    plain = row(**changes)
    return row(
        **{**changes, "tokens_per_s": part * plain.tokens * plain.accumulation / plain.guess().seconds([plain.tokens] * plain.accumulation)}
    )


def ratio(*rows: MeasuredCard, kind: str = "lora", precision: str = "bf16", card: str = "RTX 5070 Ti") -> float | None:
    sheet, method = lookup(card), builders.recipe(method={"kind": kind}).method
    assert sheet is not None
    found = measured_cards.moved(rows, sheet, method, precision)
    return None if found is None else round(found.ratio, 3)


def test_the_median_of_rows_and_guess_between_half_and_twice() -> None:
    assert ratio(of_guess(0.8)) == 0.9 and ratio(of_guess(0.8), of_guess(0.7)) == 0.8 and ratio(of_guess(0.2)) == 0.75
    assert ratio(of_guess(0.8), of_guess(0.8, seq_len=512), of_guess(0.8, accumulation=3)) == 0.8, "of other lengths, too"
    assert ratio() is None and ratio(of_guess(0.8, card="RTX 3090")) is None and ratio(of_guess(0.8), precision="fp32") is None


def test_the_same_kind_of_weights_goes_first() -> None:
    packed = of_guess(0.6, method="qlora")
    assert ratio(packed) == 0.8 and ratio(packed, of_guess(1.2)) == 1.1 and ratio(packed, of_guess(1.2), kind="qlora") == 0.8


def test_a_row_that_waited_for_the_host_says_nothing_of_the_card() -> None:
    waited = row(seq_len=64, micro_batch=1, tokens_per_s=300.0, peak_bytes=14 << 30)
    assert ratio(waited) is None
    assert Moved(0.5, ("x",)).speed(Speed(1.0, 2.0, 3.0, 4.0)) == Speed(2.0, 4.0, 6.0, 4.0), "the host is no slower for it"


def test_a_row_at_half_of_the_power_is_compared_with_the_guess_at_that_power() -> None:
    assert (row(power_limit_w=150.0).guess().token_s > row().guess().token_s) and row(power_limit_w=None).guess() == row().guess()


def plan_with(*rows: MeasuredCard, refused: tuple[str, ...] = ()) -> Plan:
    seen = healthy.gpu()
    recipe = builders.recipe(
        model={"name": "meta-llama/Llama-3.2-1B"}, train={"global_batch": 64, "steps": 10, "learning_rate": 1e-3, "seq_len": 2048}
    )
    return planning.make(dataclasses.replace(builders.plan_inputs(seen.cluster, recipe, seen.facts), measured_cards=Table(rows, refused)))


def test_the_plan_says_who_measured_and_moves_the_shares_alone() -> None:
    plain, told = plan_with(), plan_with(of_guess(2.0), of_guess(2.0))
    assert plain.time and told.time and [rank.source for rank in plain.time.ranks] == ["data sheet"] * 3
    assert [rank.source for rank in told.time.ranks] == ["measured by others: somebody", "data sheet", "data sheet"]
    assert not told.time.is_measured and told.time.tokens_per_s_low is not None
    assert told.ranks[0].share > plain.ranks[0].share and sum(rank.share for rank in told.ranks) == sum(rank.share for rank in plain.ranks)
    (speeds,) = [choice for choice in told.choices if choice.subject == "speeds"]
    assert "RTX 5070 Ti measured by others: somebody (2.00 of the data sheet's guess)" in speeds.because
    assert set(plan_with(refused=("line 7 is none",)).warnings) == {*plain.warnings, "line 7 is none"}


def test_ones_own_measurements_go_before_those_of_others() -> None:
    seen = all_measured(healthy.cpu())
    assert belief(seen)[0] == belief(seen, by_others=(of_guess(2.0),))[0]


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        ({"tokens_per_s": 9000.0}, "tokens_per_s", "at most"), ({"tokens_per_s": 0}, "tokens_per_s", "greater than 0"), ({"tokens_per_s": -1.0}, "tokens_per_s", "greater"),
        ({"tokens_per_s": 1e300}, "tokens_per_s", ""), ({"tokens_per_s": "fast"}, "tokens_per_s", "number"), ({"tokens_per_s": True}, "tokens_per_s", "number"),
        ({"peak_bytes": 17 << 30}, "peak_bytes", "more than the card's memory"), ({"peak_bytes": 0}, "peak_bytes", ""), ({"peak_bytes": 1.5}, "peak_bytes", "whole number"),
        ({"memory_bytes": 64 << 30}, "memory_bytes", "but a RTX 5070 Ti has 16.0 GiB"), ({"memory_bytes": 2**60}, "memory_bytes", ""),
        ({"card": "RTX 6090"}, "card", "data_sheets.py"), ({"card": "CPU, 8 cores"}, "card", "no data sheet"), ({"card": ""}, "card", ""), ({"card": "a\x1b[31m"}, "card", ""),
        ({"shape": {**LLAMA_7B, "model_type": "mamba"}}, "shape", "the formulas do not know"), ({"shape": {**LLAMA_7B, "hidden_size": 10**400}}, "shape.hidden_size", ""),
        ({"shape": {**LLAMA_7B, "num_hidden_layers": 0}}, "shape.num_hidden_layers", ""), ({"method": "dora"}, "method", ""),
        ({"base": "8bit", "method": "qlora"}, "method", "not a valid recipe"),
        ({"targets": ["no_layer"]}, "targets", "no layer named"), ({"power_limit_w": "N/A"}, "power_limit_w", "number"), ({"power_limit_w": 0.0}, "power_limit_w", ""),
        ({"seq_len": 0}, "seq_len", ""), ({"micro_batch": 10**9}, "micro_batch", ""), ({"hostname": "tower"}, "hostname", "unknown key"), ({"source": "me\nrm -rf"}, "source", ""),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused_with_line_key_and_fix(tmp_path: Path, change: dict[str, Any], key: str, why: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n\n{json.dumps({**ROW, **change})}\n")
    found = table.read(file)
    assert len(found.rows) == 1
    (line,) = found.refused
    assert f"{file}, line 3, key {key}: " in line and why in line and "remove the line" in line and "\x1b" not in line


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "{",
        "[]",
        "7",
        '{"card": NaN}',
        "[" * 100_000,
        json.dumps({**ROW, "tokens_per_s": float("nan")}),
        json.dumps({**ROW, "peak_bytes": float("inf")}),
    ],
)
def test_what_is_no_row_at_all_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{text}\n" * 5)
    found = table.read(tmp_path / "rows.jsonl")
    assert not found.rows and len(found.refused) == 4 and found.refused[-1].startswith("2 more rows")


def test_a_file_that_cannot_be_read_stops_no_plan(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff")
    for path in (tmp_path / "none.jsonl", tmp_path / "rows.jsonl", tmp_path):
        assert not table.read(path).rows and "cannot be read" in table.read(path).refused[0]


def test_every_row_that_is_shipped_can_be_and_is_anonymous() -> None:
    found = table.shipped()
    assert not found.refused and len(found.rows) >= 31
    for line, entry in zip(table.SHIPPED.read_text(encoding="utf-8").splitlines(), found.rows, strict=True):
        assert table.parse(table.written(entry)) == entry and len(line) < 1500
        assert "/home" not in line and "@" not in line
