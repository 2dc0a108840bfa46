"""The plan agrees with what others measured: the project's own copy of published rows, put through the real planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import foresight
from benchmarks.published import outcomes, rows, shared

from homelab.controller.attempt import card_table
from homelab.controller.base.errors import InputError
from homelab.controller.planning.speed import roofline

HEAD = rows.OWN.read_text(encoding="utf-8").splitlines()[0]
ROW = "by hand,RTX 3090,24,meta-llama/Llama-2-7b-hf,lora,2048,4,1,64,all-linear,True,False,adamw,auto,auto,1,auto,{gb},reserved,{rate},,"


def found() -> list[foresight.Forecast]:
    return [foresight.forecast(row) for row in rows.read(rows.OWN)]


def test_time_and_memory_agree_with_published_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [foresight.forecast(row) for row in outcomes.out_of_memory()]
    figures = foresight.figures(found(), failures)
    assert figures["time_rows"] >= 32 and figures["time_median_factor"] <= 1.25 and figures["time_worst_factor"] <= 2.0
    assert figures["time_90_percent_factor"] <= roofline.GUESS_FACTOR
    assert figures["memory_rows"] >= 24 and figures["memory_median_error_percent"] <= 5
    assert figures["relative_median_factor"] <= 1.3 and figures["wrong_fits"] == 0 and figures["refused_though_it_ran"] == 0
    monkeypatch.setattr(roofline, "part_of_peak", lambda card: 0.35)  # as if all cards were of one class
    before = foresight.figures(found(), failures)
    assert before["time_median_factor"] > 1.3 and before["relative_worst_factor"] > 3


def test_a_row_foretold_by_the_others_is_no_worse() -> None:
    alone = foresight.figures(found(), [])
    times = sorted(max(factor, 1 / factor) for one in foresight.told(rows.read(rows.OWN)) if (factor := one.time_factor))
    assert len(times) >= 30 and times[len(times) // 2] <= alone["time_median_factor"] and times[-1] <= 2.0


def test_the_table_of_the_package_begins_with_these_rows_and_foresight_leaves_it_out() -> None:
    published = tuple(shared.shared(rows.read(rows.OWN)))
    assert card_table.shipped().rows[: len(published)] == published and len(published) == 31
    assert all(entry.homelab is None for entry in published)
    assert foresight.forecast(rows.read(rows.OWN)[40]).row.inputs().measured_cards.rows == ()


def test_rows_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text(f"{HEAD}\n{ROW.format(gb=22, rate=1000)}\n")
    monkeypatch.setattr("sys.argv", ["foresight", "--rows", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "out.json")])
    assert foresight.main() == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["figures"]["time_rows"] == 1 and written["runs"][0]["verdict"] in ("fits", "tight")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "no row"), ("a,b\n1,2\n", "line 2"), (f"{HEAD}\n{ROW.format(gb='much', rate=1)}\n", "line 2"),
        (f"{HEAD}\n{ROW.format(gb=1, rate=10**9)}\n", "no card does that"), (f"{HEAD}\n{ROW.format(gb=-1, rate=1)}\n", "line 2"),
        (f"{HEAD}\n{ROW.format(gb=1, rate='nan')}\n", "line 2"),
    ],
)  # fmt: skip
def test_a_row_that_is_none_is_named(tmp_path: Path, text: str, seen: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        foresight.figures([foresight.forecast(row) for row in rows.read(tmp_path / "rows.csv")], [])
    assert seen in f"{caught.value.message} {caught.value.where}" and caught.value.hint


def test_who_has_not_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        rows.read(tmp_path / "none.csv")
