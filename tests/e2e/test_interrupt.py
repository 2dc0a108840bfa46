"""Ctrl-C and worse at any moment of a launch: the run lives and was announced, or nothing is left running.

On two nodes and without the collective test: test_collective has its Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from homelab.lab import procfs
from scripts.practice.desk import Desk, Run, kill_whole, left_on, name_said, read_rest, read_until, wait_until, wait_until_none_left

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(90)]

ANNOUNCED = "is starting on"
LAUNCH = ("launch", "sleeper.toml", "--nodes", "node1,node2", "--skip", "collective")

# The quick ones: before anything is there, with connections, while torchrun starts, with a run.
# What it says, or which module it has just imported (PYTHONPROFILEIMPORTTIME says that), and how long after that, in seconds.
MOMENTS = [
    ("import typer.core", 0.0),
    pytest.param("import homelab.cli.run_command", 0.0, marks=pytest.mark.thorough),
    pytest.param("import paramiko.transport", 0.0, marks=pytest.mark.thorough),
    (". asking", 0.0),
    pytest.param(". asking", 0.3, marks=pytest.mark.thorough),
    pytest.param(". connecting", 0.05, marks=pytest.mark.thorough),
    pytest.param(". run", 0.0, marks=pytest.mark.thorough),
    pytest.param(". shipping", 0.02, marks=pytest.mark.thorough),
    (". starting torchrun", 0.0),
    pytest.param(". starting torchrun", 0.1, marks=pytest.mark.thorough),
    pytest.param(". starting torchrun", 0.3, marks=pytest.mark.thorough),
    pytest.param(ANNOUNCED, 0.0, marks=pytest.mark.thorough),
]


def interrupt(
    desk: Desk, marker: str, delay_s: float, *, again_after_s: tuple[float, ...] = (), number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Launch, send SIGINT (or `number`) at that moment (and again), and wait: the exit code and all that was said."""
    controller = desk.spawn(*LAUNCH, PYTHONPROFILEIMPORTTIME="1")
    module = marker.removeprefix("import ")
    said = read_until(controller, f" {module}\n" if module != marker else marker)
    for pause_s in (delay_s, *again_after_s):
        time.sleep(pause_s)  # a moment, not a condition
        with contextlib.suppress(ProcessLookupError):
            os.killpg(controller.pid, number)
    said += read_rest(controller, timeout_s=60)
    return controller.returncode, "".join(line for line in said.splitlines(keepends=True) if not line.startswith("import time:"))


def assert_announced_or_gone(desk: Desk, code: int, said: str) -> None:
    assert "Traceback" not in said
    if ANNOUNCED in said:
        assert code in (130, 0), said  # 0: it had done all it had to do
        run = str(name_said(said))
        assert desk.json("stop", run)["clean"] is True
    else:
        assert code == 130, said
        assert "interrupted" in said
    # An agent that was asked a question may still be about to answer it.
    wait_until_none_left(desk.lab, said)


@pytest.mark.parametrize(("marker", "delay_s"), MOMENTS)
def test_control_c(desk: Desk, marker: str, delay_s: float) -> None:
    assert_announced_or_gone(desk, *interrupt(desk, marker, delay_s))


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)], ids=lambda number: number.name
)
def test_a_closed_terminal_and_kill(desk: Desk, number: signal.Signals) -> None:
    assert_announced_or_gone(desk, *interrupt(desk, ". starting torchrun", 0.05, number=number))


@pytest.mark.parametrize("pause_s", [0.05, pytest.param(0.2, marks=pytest.mark.thorough)])
def test_control_c_again_and_again(desk: Desk, pause_s: float) -> None:
    assert_announced_or_gone(desk, *interrupt(desk, ". starting torchrun", 0.0, again_after_s=(pause_s,) * 4))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_control_c_after_any_time(desk: Desk, seed: int) -> None:
    assert_announced_or_gone(desk, *interrupt(desk, ". asking", random.Random(seed).uniform(0.0, 2.5)))


def test_control_c_while_watching_leaves_the_run_alone(desk: Desk) -> None:
    controller = desk.spawn(*LAUNCH, "--wait")
    said = read_until(controller, ANNOUNCED)
    said += read_until(controller, "starting\n")
    os.killpg(controller.pid, signal.SIGINT)
    said += read_rest(controller)
    assert controller.returncode == 130, said
    assert "The run continues" in said
    assert left_on(desk.lab)
    assert desk.json("stop", str(name_said(said)))["clean"] is True
    wait_until_none_left(desk.lab)


def test_kill_while_it_starts_can_be_stopped(desk: Desk) -> None:
    controller = desk.spawn(*LAUNCH)
    said = read_until(controller, ". starting torchrun")
    kill_whole(controller)
    lab = desk.lab

    def is_asked() -> bool:
        return any(procfs.command_line(pid)[-1:] == ["start"] for node in lab.nodes for pid in lab.processes_of(node.name))

    wait_until(lambda: not is_asked(), 20.0)
    run = Run(lab, str(name_said(said)))
    assert run.name in {row["name"] for row in desk.json("runs")["runs"]}
    assert desk.json("stop", run.name)["clean"] is True
    wait_until_none_left(lab)
