"""`homelab runs --prune` on a lab: shows, asks, removes here and on the nodes; a run that goes on stays, whatever is named."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from scripts.practice.desk import COMMAND, Desk, wait_until
from tests.cli.conftest import complaint
from tests.cli.test_runs import fresh

__all__ = ["fresh"]
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


def launched(desk: Desk, *, ends: bool) -> str:
    desk.write("train.py", "print('done')\n" if ends else "import time\ntime.sleep(300)\n")
    run = str(desk.json("launch", "script.toml", "--nodes", "node1")["run"])
    if ends:
        wait_until(lambda: desk.json("status", run)["state"] == "done", 60)
    return run


def places(desk: Desk, run: str) -> list[bool]:
    return [(desk.folder / "runs" / run).exists(), (Path(desk.lab.state.node("node1").workdir) / "runs" / run).exists()]


def answered(desk: Desk, answer: str, *words: str) -> str:
    """The command at a terminal, where a person types one answer."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "runs", "--prune", *words], cwd=desk.folder, env=desk._environment(), stdin=theirs, stdout=subprocess.PIPE, text=True
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    said, _ = process.communicate(timeout=60)
    os.close(ours)
    return said


def test_what_is_over_goes_and_what_lives_stays(fresh: Desk) -> None:
    desk = fresh
    old, older = launched(desk, ends=True), launched(desk, ends=True)
    living = launched(desk, ends=False)
    assert "no terminal to ask" in complaint(desk, "runs", "--prune", code=2)["message"]
    assert "names and --yes are for --prune" in complaint(desk, "runs", old, code=2)["message"]
    assert "no run is called" in complaint(desk, "runs", "--prune", "nothing", code=2)["message"]
    said = answered(desk, "n")
    assert f"{old}  done" in said and f"{living}  stays" in said and places(desk, old) == [True, True]
    refused = desk.json("runs", "--prune", living, "--yes")
    assert refused["removed"] == [] and "it is running on this node" in refused["staying"][living] and places(desk, living) == [True, True]
    answered(desk, "y", older[11:])  # its end
    assert places(desk, older) == [False, False] and places(desk, old) == [True, True]
    assert desk.json("runs", "--prune", "--yes")["removed"] == [old]
    assert places(desk, old) == [False, False] and [row["name"] for row in desk.json("runs")["runs"]] == [living]
    desk.homelab("stop", living[:-1])
    assert desk.json("runs", "--prune", "--yes")["removed"] == [], "the newest stays"
    assert desk.json("runs", "--prune", "--yes", "--keep", "0")["removed"] == [living]
    assert "Removed 0 runs" in desk.homelab("runs", "--prune").stdout
