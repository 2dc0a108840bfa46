"""A run between its name and its start, and two launches on one node without a card, one at once after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.practice.desk import Desk, wait_until
from tests.cli.conftest import complaint

pytestmark = pytest.mark.timeout(300)
LAUNCH = ("launch", "script.toml", "--skip", "collective", "--nodes", "node1")


def held_before_its_start(desk: Desk) -> tuple[subprocess.Popen[str], Path]:
    """A real launch that is stopped by a signal (as by Ctrl-Z) when it has its name, and nothing is on a node; the run's folder."""
    launching = desk.spawn(*LAUNCH)
    wait_until(lambda: bool(list((desk.folder / "runs").glob("*/supervisor.json"))), 60.0)
    os.kill(launching.pid, signal.SIGSTOP)
    (record,) = (desk.folder / "runs").glob("*/supervisor.json")
    assert not (record.parent / "run.json").exists(), "too late: the launch was quicker than this test"
    return launching, record.parent


def test_status_says_who_launches_it_and_comes_by_itself(desk: Desk) -> None:
    launching, folder = held_before_its_start(desk)
    try:
        error = complaint(desk, "status", folder.name, "--once", code=1)
        assert error["message"] == "this run is being launched, and nothing of it is on its nodes yet"
        assert error["where"].startswith(f"{folder.name}, by process {launching.pid} on this machine, for ")
        assert f"homelab status --wait {folder.name}" in error["hint"] and f"kill {launching.pid}" in error["hint"]
        watching = desk.spawn("status", "--wait", folder.name)
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert "this run is being launched" in first and str(launching.pid) in first
    finally:
        os.kill(launching.pid, signal.SIGCONT)
    out, _ = launching.communicate(timeout=120)
    assert launching.returncode == 0, out
    second = json.loads(desk.homelab(*LAUNCH, "--json").stdout)  # the port of the first one is not bound yet, perhaps
    ports = {json.loads(file.read_text())["master_port"] for file in (desk.folder / "runs").glob("*/attempts/1/plan.json")}
    assert len(ports) == 2
    for run in (second["run"], folder.name):
        wait_until(lambda run=run: desk.json("status", run)["state"] == "running", 60.0)
        desk.homelab("stop", run)
    said, _ = watching.communicate(timeout=120)
    assert "running" in said and watching.returncode == 1, said


def test_a_launch_that_is_ended_is_said_too(desk: Desk) -> None:
    launching, folder = held_before_its_start(desk)
    try:
        watching = desk.spawn("status", "--wait", folder.name)
        assert watching.stdout is not None and "this run is being launched" in watching.stdout.readline()
        subprocess.run(["kill", str(launching.pid)], check=True)  # as the hint says
    finally:
        os.kill(launching.pid, signal.SIGCONT)
    launched, _ = launching.communicate(timeout=120)
    assert launching.returncode == 130, launched
    out, _ = watching.communicate(timeout=120)
    assert watching.returncode == 1 and "error: the launch has ended, and nothing was started" in out, out
    assert not folder.exists() and complaint(desk, "status", folder.name, code=2)["message"].startswith("no run is called")
