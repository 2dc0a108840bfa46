"""A rank that a scheduler has started: which attempt it is, and from which step it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homelab.shared.protocol import files
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError
from homelab.worker.training import scheduled

RUN = "2026-01-01-0000-law"


def job(folder: Path) -> Path:
    run_dir = folder / "runs" / RUN
    files.write_json(run_dir / "attempts/0/plan.json", {"attempt": 0, "resume_step": 0, "world_size": 1, "shared_folder": True})
    return run_dir


def plan_of(run_dir: Path, attempt: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / f"attempts/{attempt}/plan.json").read_text())
    return found


def test_nothing_is_changed_for_a_rank_that_homelab_has_started(tmp_path: Path) -> None:
    assert scheduled.variables({"RANK": "0"}) == {}


def test_the_first_start_is_attempt_one_from_the_beginning(tmp_path: Path) -> None:
    run_dir = job(tmp_path)
    said = scheduled.variables({"HOMELAB_JOB": str(tmp_path), "HOMELAB_RUN": RUN})
    assert said == {"HOMELAB_RUN_DIR": str(run_dir), "HOMELAB_ATTEMPT": "1", "HOMELAB_NODE": "node-0"}
    assert plan_of(run_dir, 1) == {"attempt": 1, "resume_step": 0, "world_size": 1, "shared_folder": True}


def test_the_next_one_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = job(tmp_path)
    assert scheduled.next_attempt(run_dir) == 1
    (run_dir / "checkpoints/step-00000012").mkdir(parents=True)  # without a manifest: not complete
    monkeypatch.setattr(checkpoint_folder, "complete_steps", lambda root: [4, 8] if root == run_dir / "checkpoints" else [])
    assert scheduled.next_attempt(run_dir) == 2 and plan_of(run_dir, 2)["resume_step"] == 8


def test_a_start_that_ended_before_its_plan_is_no_attempt_to_share(tmp_path: Path) -> None:
    run_dir = job(tmp_path)
    (run_dir / "attempts/1").mkdir()
    assert scheduled.next_attempt(run_dir) == 2


def test_a_folder_that_is_not_the_job_s_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="plan of the exported job cannot be read") as caught:
        scheduled.variables({"HOMELAB_JOB": str(tmp_path), "HOMELAB_RUN": RUN})
    assert str(tmp_path) in caught.value.where and "homelab export --at" in caught.value.hint
