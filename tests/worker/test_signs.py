"""A rank's signs of life between two steps: one per pass, and so seldom that they cost nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.worker import metrics

pytestmark = pytest.mark.timeout(10)


def test_a_pass_is_a_sign_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now_s)
    task: Any = SimpleNamespace(rank=0, rank_dir=tmp_path, resume_step=7)
    recorder = metrics.Recorder(task)

    def said() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "heartbeat.json").read_text())
        return found

    recorder.heartbeat("training")
    for _ in range(5):
        recorder.sign()
    assert said()["passes"] == 0, "nothing is written in the same second"
    now_s += metrics.SIGN_S
    recorder.sign()
    assert (said()["passes"], said()["phase"], said()["step"]) == (6, "training", 7)
    recorder.heartbeat("evaluating")
    now_s += metrics.SIGN_S
    recorder.sign()
    assert (said()["passes"], said()["phase"]) == (7, "evaluating"), "a pass of an evaluation is one, too"
