"""A job whose hours end stops at a checkpoint, and goes on from it in the next ones: no step is done twice, none is left out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run import store
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.conftest import GLOBAL_BATCH, ROWS, recipe

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]
STEPS, EVERY, PER_EPOCH = 900, 50, -(-ROWS // GLOBAL_BATCH)


def test_a_job_is_stopped_for_the_day_and_loses_nothing(desk: Desk, lab: Lab, model: Path) -> None:
    desk.write("hours.toml", recipe(model, length=f"steps = {STEPS}").replace("every_steps = 10", f"every_steps = {EVERY}"))
    desk.homelab("queue", "add", "hours.toml", "--skip", "collective", "--skip", "model")
    queue = desk.folder / "runs" / "queue"

    def job(state: str) -> dict[str, Any]:
        return store.read_object(queue / state / "0001.json")

    def with_hours(state: str, **hours: str) -> None:
        file = queue / state / "0001.json"
        store.write_json(file, job(state) | hours)

    runner = desk.spawn("queue", "run", HOMELAB_SUPERVISE="here")
    try:
        wait_until(lambda: bool(job("running").get("run")), 100)
        run = Run(lab, job("running")["run"])
        run.wait_for_step(1, EVERY + 5, timeout_s=100)
        other_half = "00" if time.localtime().tm_hour >= 12 else "12"
        with_hours("running", not_before=f"{other_half}:00", stop_at=f"{other_half}:01")  # its hours are over
        wait_until(lambda: bool(job("waiting").get("run")), 100, lambda: json.dumps(job("running")))
        assert not lab.processes_of_run(run.name)["node1"] and len(run.losses()) < STEPS
        with_hours("waiting", not_before="", stop_at="")
        out, _ = runner.communicate(timeout=200)
    finally:
        runner.kill()
    assert runner.returncode == 0 and "1 done, 0 failed" in out, out
    assert job("done")["run"] == run.name and run.attempts() == [1, 2]
    resumed = store.read_object(desk.folder / "runs" / run.name / "attempts" / "2" / "plan.json")["resume_step"]
    assert resumed >= EVERY and resumed % EVERY == 0, "from a checkpoint, and not from the beginning"
    assert sorted(run.losses()) == list(range(1, STEPS + 1))

    epochs = run.samples()
    assert sorted(epochs) == list(range(STEPS // PER_EPOCH))
    assert all(sorted(ids) == list(range(ROWS)) for ids in epochs.values()), "every sample once per epoch, over both attempts"
