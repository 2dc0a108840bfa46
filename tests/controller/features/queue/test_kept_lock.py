"""A process that a person has stopped (Ctrl-Z) keeps the lock of the queue: a command says which one, and a runner waits and says it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from homelab.cli.main import run
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.queue import queue_folder
from homelab.controller.features.queue.queue_folder import QueueFolder
from scripts.practice.desk import REPOSITORY, wait_until
from tests.controller.features.queue.practice_nodes import filled, job

pytestmark = pytest.mark.timeout(120)
HOLDER = """
import os, signal, sys
from pathlib import Path
from homelab.controller.features.queue.queue_folder import QueueFolder

def ids(first):
    os.kill(os.getpid(), signal.SIGSTOP)
    return []

QueueFolder(Path(sys.argv[1])).add(ids)
"""


@pytest.fixture
def queue(tmp_path: Path) -> QueueFolder:
    return filled(QueueFolder(tmp_path / "runs"), job(), job())


@pytest.fixture
def holder(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A real process that a signal has stopped in the middle of a change."""
    monkeypatch.setattr(queue_folder, "EDIT_S", 0.2)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(queue.runs_dir)], env=environment) as process:
        try:
            found = psutil.Process(process.pid)
            wait_until(lambda: found.status() == psutil.STATUS_STOPPED, 60.0)
            yield found
        finally:
            process.kill()


def test_it_is_named_with_the_command_that_lets_it_go_on(queue: QueueFolder, holder: psutil.Process) -> None:
    with pytest.raises(HomelabError) as caught:
        queue.listing()
    assert caught.value.message == f"process {holder.pid} is stopped (SIGSTOP or Ctrl-Z) and keeps the queue locked"
    assert caught.value.where == str(queue.root / "edit.lock")
    fix = f"kill -CONT {holder.pid}"
    assert str(caught.value.hint) == f"let it go on: {fix}; or end it: kill -KILL {holder.pid}"
    subprocess.run(fix, shell=True, check=True)
    wait_until(lambda: not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE, 60.0)
    assert len(queue.listing().waiting) == 2


def test_the_other_fix_ends_it_and_the_command_says_all_three_parts(
    queue: QueueFolder, holder: psutil.Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(queue.runs_dir.parent)
    Path("cluster.toml").write_text('[[nodes]]\nname = "a"\nhost = "127.0.0.1"\n')
    typed = ["queue", "--cluster", "cluster.toml", "--runs-dir", "runs"]
    assert run(typed) == 1
    said = capsys.readouterr().err
    assert f"error: process {holder.pid} is stopped" in said and "where: runs/queue/edit.lock" in said and "fix:   let it go on: " in said
    subprocess.run(f"kill -KILL {holder.pid}", shell=True, check=True)
    assert run(typed) == 0 and "2 jobs wait" in capsys.readouterr().out


def test_one_that_works_is_named_too(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_folder, "EDIT_S", 0.05)
    with queue._edited(), pytest.raises(HomelabError) as caught:
        queue.listing()
    assert (
        caught.value.message == f"process {os.getpid()} has kept the queue locked for 0 s" and f"ps -fp {os.getpid()}" in caught.value.hint
    )


def test_a_runner_says_it_and_waits(queue: QueueFolder, holder: psutil.Process) -> None:
    """It would end in the middle of the night else."""
    said: list[str] = []

    def kept(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            holder.resume()

    assert len(QueueFolder(queue.runs_dir, kept).listing().waiting) == 2
    assert said[0].startswith(f"process {holder.pid} is stopped") and f"kill -CONT {holder.pid}" in said[0]
