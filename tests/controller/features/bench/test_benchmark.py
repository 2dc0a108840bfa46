"""Suites, cells, measurements, summaries, CSV, charts and the page; bad suites are refused before anything runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.load import load_cluster
from homelab.controller.config.suite import Suite, load_suite
from homelab.controller.features.bench import page, table
from homelab.controller.features.bench.cell import ALONE, Cell, cells_of
from homelab.controller.features.bench.folder import BenchmarkFolder
from homelab.controller.features.bench.measurement import Measurement, measure
from homelab.controller.features.bench.result import Result, summaries
from homelab.shared.protocol.rank_messages import Metric
from tests import builders

NODES = {"tower": 1, "laptop": 1, "mini": 1}
RECIPE = """
[model]
name = "org/model"
[data]
train = "data/rows.jsonl"
eval = "data/held-out.jsonl"
[method]
kind = "lora"
[train]
global_batch = 6
epochs = 2
learning_rate = 1e-3
[parallel]
shares = "equal"
"""


def suite_file(folder: Path, text: str = "") -> Path:
    (folder / "r.toml").write_text(RECIPE)
    file = folder / "s.toml"
    file.write_text('recipe = "r.toml"\n' + text)
    return file


def test_cells_of_a_suite() -> None:
    suite = Suite.model_validate({"recipe": "r.toml", "strategies": ["ddp", "zero2"], "nodes": ["each", 2, 3, "all", ["mini", "tower"]]})
    labels = [cell.label for cell in cells_of(suite, NODES)]
    assert labels == [
        "alone on tower", "alone on laptop", "alone on mini", "ddp on tower, laptop", "zero2 on tower, laptop", "ddp on tower, mini", "zero2 on tower, mini",
        "ddp on tower, laptop, mini", "zero2 on tower, laptop, mini",
    ]  # fmt: skip
    two_cards = cells_of(Suite.model_validate({"recipe": "r", "nodes": ["each"]}), {"tower": 2, "laptop": 1})
    assert [cell.label for cell in two_cards] == ["ddp on tower", "zero2 on tower", "zero3 on tower", "alone on laptop"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('strategies = ["ddp", "zero9"]', "zero9"),
        ('strategies = ["zero3", "fsdp"]', "another name of zero3"),
        ('strategies = ["auto"]', "auto"),
        ('nodes = ["all", "all"]', "there twice"),
        ("nodes = [[]]", "at least one node"),
        ("nodes = [0]", "at least one node"),
        ("steps = 5", "fewer than 3 steps"),
        ("repeat = 3", 'Did you mean "repeats"'),
        ('[[variations]]\nname = "a"\nset = {}\n[[variations]]\nname = "a"\nset = {}', "two variations"),
        ('[[variations]]\nname = "a"\nset = { train.learning_rate = "fast" }', 'variation "a" makes an impossible recipe'),
        ('[[variations]]\nname = "a"\nset = { train.seq_length = 5 }', "seq_length"),
        ('[[variations]]\nname = "a"\nnetwork = "wify"', 'Did you mean "wifi"'),
    ],
)
def test_a_bad_suite_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        load_suite(suite_file(tmp_path, text))
    assert said in refusal.value.message
    assert refusal.value.where and refusal.value.hint


@pytest.mark.parametrize(
    ("nodes", "said"), [([4], "4 nodes are asked for, but there are 3"), ([["towr"]], "towr"), ([["mini", "mini"]], "twice")]
)
def test_nodes_that_the_cluster_does_not_have(nodes: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        cells_of(Suite.model_validate({"recipe": "r", "nodes": nodes}), NODES)


def test_a_cells_recipe_is_as_long_as_the_suite_says_and_finds_its_data(tmp_path: Path) -> None:
    from homelab.controller.config.load import load_recipe

    _, contents = load_suite(suite_file(tmp_path, '[[variations]]\nname = "long"\nset = { train.seq_len = 64 }'))
    file = BenchmarkFolder(tmp_path / "out").recipe(Cell("long", "zero2", ("tower", "laptop")), contents["long"], tmp_path)
    recipe = load_recipe(file)
    assert recipe.train and recipe.data and recipe.train.steps == 12 and recipe.train.epochs is None and recipe.train.seq_len == 64
    assert recipe.data.eval is None and recipe.parallel.strategy == "zero2" and recipe.parallel.shares == "equal"
    assert (file.parent / recipe.data.train).resolve() == (tmp_path / "data/rows.jsonl").resolve()


@pytest.mark.parametrize("file", builders.PROJECT_SUITES, ids=lambda file: file.stem)
def test_the_suites_of_the_project_have_cells_on_the_example_cluster(file: Path) -> None:
    suite, contents = load_suite(file)
    cells = cells_of(suite, {node.name: node.rank_count for node in load_cluster(file.parents[2] / "cluster.toml").nodes})
    assert cells and {cell.variation for cell in cells} == set(contents)


def test_a_variation_may_be_another_network_profile(tmp_path: Path) -> None:
    suite, contents = load_suite(
        suite_file(tmp_path, '[[variations]]\nname = "as it is"\n[[variations]]\nname = "as wifi"\nnetwork = "wifi"')
    )
    cluster = builders.cluster()
    assert contents["as it is"] == contents["as wifi"], "the recipe is the same"
    assert suite.cluster_of("as it is", cluster) is cluster
    assert suite.cluster_of("as wifi", cluster).wire.profile == "wifi" and cluster.wire.profile == "auto"


def metric(rank: int, step: int, *, step_s: float, wire_s: float, attempt: int = 1) -> Metric:
    return Metric(
        kind="train", attempt=attempt, rank=rank, step=step, tokens=100 * (rank + 1), step_s=step_s, communication_s=wire_s, loss=3.0 - step / 10, memory_bytes=rank + step
    )  # fmt: skip


def test_a_measurement_by_hand() -> None:
    lines = [metric(rank, step, step_s=2.0 + rank, wire_s=0.6 - 0.3 * rank) for step in range(1, 5) for rank in (0, 1)]
    measured = measure(lines, 2, 2)
    assert measured is not None
    assert (measured.steps, measured.tokens, measured.seconds) == (2, 600, 6.0)
    assert measured.tokens_per_s == 100 and measured.step_s == 3
    assert measured.wire == pytest.approx(0.1) and measured.wait == pytest.approx(0.05) and measured.compute == pytest.approx(0.85)
    assert measured.input is None
    telling = measure([line.replace(input_s=0.3) for line in lines], 2, 2)
    assert telling is not None and telling.input == pytest.approx(0.1) and telling.compute == pytest.approx(0.75)
    assert measured.memory_bytes == {"0": 4, "1": 5} and measured.loss == pytest.approx(2.6)
    assert measure(lines[:-1], 2, 2) is None, "a step lacks a rank"
    assert measure(lines, 2, 4) is None, "nothing is left"


def result(strategy: str, nodes: tuple[str, ...], speed: float, repeat: int = 1, plan: float | None = None, **more: Any) -> Result:
    measured = Measurement(
        steps=5, tokens=500, seconds=500 / speed, tokens_per_s=speed, step_s=100 / speed, step_s_low=1, step_s_high=2, compute=0.8, wire=0.2, wait=0,
        memory_bytes={"0": 2**30}, loss=2.5,
    )  # fmt: skip
    return Result(
        variation="", strategy=strategy, nodes=nodes, repeat=repeat, state="done", measured=measured, plan_tokens_per_s=plan, plan_is_measured=plan is not None, **more
    )  # fmt: skip


CELLS = (
    Cell("", ALONE, ("tower",)),
    Cell("", ALONE, ("laptop",)),
    Cell("", "ddp", ("tower", "laptop")),
    Cell("", "zero2", ("tower", "laptop")),
)
RESULTS = [
    result(ALONE, ("tower",), 100), result(ALONE, ("laptop",), 60), result("ddp", ("tower", "laptop"), 120, plan=132), result("ddp", ("tower", "laptop"), 136, 2, plan=120),
    result("ddp", ("tower", "laptop"), 128, 3), Result(variation="", strategy="zero2", nodes=("tower", "laptop"), repeat=1, state="refused", because="<no room>"),
]  # fmt: skip


def test_efficiency_is_against_the_sum_of_the_nodes_alone() -> None:
    *_, ddp, zero2 = summaries(CELLS, RESULTS)
    assert ddp.tokens_per_s == 128 and ddp.efficiency == pytest.approx(0.8) and ddp.spread == pytest.approx(0.125)
    assert ddp.plan_error == pytest.approx((132 / 120 + 120 / 136) / 2 - 1) and ddp.plan_error_most == pytest.approx(120 / 136 - 1), (
        "the one that is furthest off"
    )
    assert zero2.tokens_per_s is None and zero2.because == "<no room>"
    assert summaries(CELLS[2:3], RESULTS)[0].efficiency is None, "nobody measured the nodes alone"


def test_csv_has_a_line_for_each_run_and_can_be_read_back() -> None:
    lines = list(csv.DictReader(io.StringIO(table.as_csv(RESULTS))))
    assert len(lines) == len(RESULTS) and list(lines[0]) == list(table.COLUMNS)
    assert lines[2]["tokens_per_s"] == "120" and lines[2]["nodes"] == "tower laptop" and lines[-1]["because"] == "<no room>"


def test_charts_and_page_escape_what_they_show(tmp_path: Path) -> None:
    cells = summaries(CELLS, RESULTS)
    drawn = page.chart_curves(cells)
    assert [curve.name for curve in drawn] == ["Speed", "Time of a step", "Efficiency", "Memory"]
    assert [(point.step, point.value) for point in drawn[0].series[0].points] == [(1, 100), (2, 128)]
    suite, _ = load_suite(suite_file(tmp_path))
    about = page.About("<script>", suite, {"s.toml": "<b>"}, ["homelab bench s.toml"], 0.0)
    html = page.render(about, cells, RESULTS)
    assert "<script>" not in html and "&lt;no room&gt;" in html and "&lt;b&gt;" in html and "128" in html


def test_svg_becomes_png() -> None:
    import xml.etree.ElementTree as ElementTree

    resvg_py = pytest.importorskip("resvg_py")
    svg = page.standalone(page.chart_curves(summaries(CELLS, RESULTS))[0])
    ElementTree.fromstring(svg)
    assert "var(" not in svg and "ddp" in svg
    assert bytes(resvg_py.svg_to_bytes(svg_string=svg))[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_adapter_of_a_recipe_is_found_from_the_folder_of_the_benchmark(tmp_path: Path) -> None:
    adapter = tmp_path / "models" / "2026-run"
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    content = {"model": {"name": "org/small", "adapter": "2026-run"}, "data": {"train": "rows.jsonl"}}
    written = BenchmarkFolder(tmp_path / "bench").recipe(Cell("", "ddp", ("tower",)), content, tmp_path)
    assert f'adapter = "{adapter}"' in written.read_text()
