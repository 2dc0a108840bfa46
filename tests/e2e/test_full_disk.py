"""The controller's disk is full: a run is looked after all the same, and it can be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.run import store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, left_on, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.namespaces, pytest.mark.timeout(150)]


@pytest.fixture
def small(desk: Desk, lab: Lab, tmp_path: Path) -> Iterator[Desk]:
    """A desk whose runs are supervised and lie on a disk of their own, of one megabyte."""
    found = Desk(tmp_path, lab, supervise=True)
    for name in ("sleeper.toml", "sleeper.py"):
        (tmp_path / name).write_text((desk.folder / name).read_text())
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
    try:
        yield found
    finally:
        for folder in disk.iterdir():
            pid = store.read_object(RunPaths(folder).supervisor_json).get("pid")
            if pid and folder.name in procfs.command_line(pid):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        for size in (4096, 1):
            while True:
                stream.write(bytes(size))


def is_worker(pid: int) -> bool:
    words = " ".join(procfs.command_line(pid))
    return "sleeper.py" in words and "torch.distributed" not in words


def test_recovery_waits_for_room_and_stop_does_not(small: Desk, lab: Lab) -> None:
    run = small.launch("sleeper.toml")
    paths = RunPaths(small.folder / "runs" / run.name)
    run.wait_for_output(1, "node2", "asleep")
    filler = paths.root.parent / "filler"
    fill(filler)

    os.kill(next(pid for pid in lab.processes_of("node2") if is_worker(pid)), signal.SIGKILL)
    # What is left of the first attempt is ended, and the plan of the next one finds no room.
    wait_until(lambda: all("homelab.node follow" in words for words in left_on(lab).values()), 60, lambda: str(left_on(lab)))
    assert supervisor_lock.is_held(paths), "its supervisor is at work"
    assert run.attempts() == [1]
    filler.unlink()
    wait_until(lambda: paths.plan_json(2).exists(), 60, lambda: paths.supervisor_log.read_text())
    run.wait_for_output(2, "node2", "asleep")

    fill(filler)
    done = small.homelab("stop", run.name)
    assert "verified" in done.stdout and "warning: it cannot be written: No space left" in done.stderr
    wait_until(lambda: not supervisor_lock.is_held(paths) and not left_on(lab), 20, lambda: str(left_on(lab)))
    stopped = small.json("stop", run.name)
    assert stopped["clean"] and "make room" in stopped["warnings"][0]["hint"]
