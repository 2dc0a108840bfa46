"""A run's record: the chain of its lines, and the checkpoints that it names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import chain, checkpoint_copies, manifest
from tests.worker import harness

pytestmark = pytest.mark.timeout(120)
RECIPE: dict[str, Any] = {
    "method__kind": "lora", "train__steps": 6, "train__epochs": None, "checkpoint__keep": 1, "checkpoint__keep_every": 2, "data__eval_fraction": 0.2,
    "tracking__eval_every_steps": 4, "checkpoint__every_steps": None,
}  # fmt: skip
_MEASURED = {"time", "tokens_per_s", "step_s", "communication_s", "attempt", "node", "chain"}


def record(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "final" / chain.RECORD).read_text().splitlines()]


def decided(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in _MEASURED} for line in lines]


def test_the_record_is_a_chain_that_names_each_kept_checkpoint_and_goes_on_after_a_restart(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE)
    forks.train(run, 1, [7, 5])
    lines = record(run)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("start", 0), ("eval", 0), ("train", 1), ("train", 2), ("kept", 2), ("train", 3), ("train", 4), ("kept", 4), ("eval", 4), ("train", 5),
        ("train", 6), ("kept", 6), ("eval", 6),
    ]  # fmt: skip
    assert chain.first_break(lines) is None
    assert chain.of_card((run / "final/README.md").read_text()) == chain.end_of(lines) != ""
    assert manifest.steps(run) == [2, 4, 6], "keep is 1"
    for line in lines:
        if line["kind"] == "kept":
            assert line["sha256"] == checkpoint_copies.state_digest(manifest.digests(manifest.folder_of(run, line["step"])))
    steps = [line for line in lines if line["kind"] == "train"]
    assert len({line["batch"] for line in steps}) == 6 and all(len(line["passes"]) in (12, 11) for line in steps)

    again = harness.make_run(tmp_path / "again", model, data, **RECIPE)
    shutil.copytree(run / "checkpoints/step-00000004", again / "checkpoints/step-00000004")
    shutil.copy(run / "run.json", again)
    forks.train(again, 2, [12], resume_step=4)
    other = record(again)
    assert chain.first_break(other) is None
    passes = {"passes", "grad_norm", "loss", "eval_loss", "eval_perplexity", "sha256"}  # one rank: other passes, and rounding
    assert [{**line, **dict.fromkeys(passes & line.keys())} for line in decided(other)] == [
        {**line, **dict.fromkeys(passes & line.keys())} for line in decided(lines)
    ]
    assert decided(other)[:8] == decided(lines)[:8], "up to the checkpoint, its own line included"
