"""A window of a run that is computed again, on other ranks: its losses and its weights beside those of the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.shared.protocol import chain, checkpoint_copies, manifest, window
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.training.recomputed import Recomputed
from tests.worker import harness
from tests.worker.training.test_preferences import labelled, pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
RECIPE: dict[str, Any] = {
    "method__kind": "lora", "train__steps": 6, "train__epochs": None, "checkpoint__keep": 1, "checkpoint__keep_every": 2, "checkpoint__every_steps": None,
    "data__eval_fraction": 0.2, "tracking__eval_every_steps": 4,
}  # fmt: skip


def recomputed(
    forks: harness.Forks, run: Path, begin: int, end: int, shares: Sequence[int], passes: dict[str, str] | None = None, **plan: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of the window, and what it says of the weights."""
    folder = run.parent / f"{run.name}-verify-{begin}-{end}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    described = json.loads((run / "run.json").read_text())
    described |= {"name": folder.name, window.REQUEST: {"run": run.name, "begin": begin, "end": end, "passes": passes or {}}}
    (folder / "run.json").write_text(json.dumps(described))
    forks.train(folder, 1, shares, resume_step=begin, **plan)
    lines = [json.loads(line) for line in (folder / window.FOLDER / chain.RECORD).read_text().splitlines()]
    assert not (folder / "final").exists()
    return lines, json.loads((folder / window.FOLDER / window.COMPARED).read_text())


def test_a_window_ends_where_it_should_and_is_the_same_again_or_nearly_on_other_ranks_also_with_dropout(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE, method__dropout=0.2)
    forks.train(run, 1, [7, 5])
    record = [json.loads(line) for line in (run / "final" / chain.RECORD).read_text().splitlines()]
    before = {line["step"]: line for line in record if line["kind"] == "train"}
    passes = {str(step): line["passes"] for step, line in before.items()}
    for begin, end, shares, most, stages in (
        (2, 4, [7, 5], 0.0, None),
        (2, 4, [12], 1e-5, None),
        (0, 2, [3, 4, 5], 1e-5, None),
        (2, 4, [12, 0], 1e-5, [1, 1]),
    ):
        lines, compared = recomputed(forks, run, begin, end, shares, passes, stages=stages)
        steps = [line for line in lines if line["kind"] == "train"]
        assert [line["step"] for line in steps] == list(range(begin + 1, end + 1))
        for line in steps:
            assert {name: line[name] for name in ("batch", "passes")} == {name: before[line["step"]][name] for name in ("batch", "passes")}
            assert line["loss"] == pytest.approx(before[line["step"]]["loss"], rel=most or 1e-15)
        weights = compared["weights"]
        assert weights["node"] == "here" and weights["way"] > 0.001
        assert weights["apart"] <= most * weights["way"], (begin, end, shares, weights)


def test_a_node_that_has_another_checkpoint_than_the_record_names_has_none(tmp_path: Path) -> None:
    for name in ("run", "window"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    kept = {}
    for step in (2, 4):
        folder = checkpoint_folder.write(
            tmp_path / "run/checkpoints", step, "hash", {"trainable.safetensors": lambda path: path.write_bytes(b"x")}
        )
        kept[str(step)] = checkpoint_copies.state_digest(manifest.digests(folder))
    for right, wrong in ((2, 4), (4, 2)):
        asked: dict[str, Any] = {"run": "run", "begin": 2, "end": 4, "kept": {**kept, str(wrong): "0" * 64}}
        task = SimpleNamespace(
            run={window.REQUEST: asked}, run_dir=tmp_path / "window", checkpoints_dir=tmp_path / "window/checkpoints", is_keeper=True
        )
        found = Recomputed(task)  # type: ignore[arg-type]
        assert found._kept(right) is not None and found._kept(wrong) is None
        found.take_checkpoint()
        assert [path.name for path in task.checkpoints_dir.iterdir()] == (["step-00000002"] if right == 2 else [])
        shutil.rmtree(task.checkpoints_dir / "step-00000002", ignore_errors=True)
    asked["kept"]["4"] = "0" * 64
    assert found._compared({}) is None


@pytest.mark.parametrize(("kind", "method"), [("dpo", "full"), ("kto", "lora")])
def test_a_window_of_compared_answers_begins_with_what_the_base_gave_to_them(
    kind: str, method: str, forks: harness.Forks, tmp_path: Path, model: Path
) -> None:
    rows = harness.write_jsonl(tmp_path / "rows.jsonl", labelled(24) if kind == "kto" else pairs(24))
    run = harness.make_run(tmp_path / "run", model, rows, **RECIPE | {"method__kind": method, "train__steps": 4}, objective__kind=kind)
    forks.train(run, 1, [7, 5])
    before = {
        line["step"]: line["loss"]
        for line in map(json.loads, (run / "final" / chain.RECORD).read_text().splitlines())
        if line["kind"] == "train"
    }
    for begin, end in ((0, 2), (2, 4)):
        lines, compared = recomputed(forks, run, begin, end, [4, 8])
        assert {line["step"]: line["loss"] for line in lines if line["kind"] == "train"} == pytest.approx(
            {step: before[step] for step in range(begin + 1, end + 1)}, rel=1e-5
        )
        assert compared["weights"]["apart"] <= 1e-4 * compared["weights"]["way"]
