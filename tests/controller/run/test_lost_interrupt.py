"""A Ctrl-C or `kill` that comes while a finaliser runs, or native code calls Python, ends the command all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import SchemaSerializer, SchemaValidator, core_schema

from homelab.cli import command_list, main
from homelab.shared.protocol.errors import EXIT_INTERNAL, EXIT_INTERRUPTED
from scripts.practice.desk import REPOSITORY, heed_signals

pytestmark = pytest.mark.timeout(60)
PROGRAM = """
import os, signal, sys, time
from homelab.controller.run import signals

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

if sys.argv[2] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
signals.count_alike()
try:
    Finalised()
    print("it goes on", flush=True)
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
CUT = """
from homelab.cli import command_list, main, terminal

def app(**_):
    terminal.echo("here", err=True)  # what it imports is there: no `exec` of its own comes after the one that is cut
    exec("raise KeyboardInterrupt")

command_list.app = app
main.main()
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "plain"),
        (signal.SIGTERM, "plain"),
        (signal.SIGHUP, "plain"),
        (signal.SIGTERM, "ignored"),
        (signal.SIGHUP, "ignored"),
    ],
)
def test_it_is_raised_once_more(number: signal.Signals, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), how], env=environment, capture_output=True, text=True, timeout=15,
        preexec_fn=heed_signals,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "interrupted" and "Exception ignored" not in done.stderr, (done.stdout, done.stderr)


def test_an_interrupt_that_cuts_an_exec_ends_the_command_with_its_own_code(tmp_path: Path) -> None:
    """In namedtuple, dataclass and more: `python -m` would end itself by SIGINT."""
    (tmp_path / "cut.py").write_text(CUT)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-m", "cut"], env=environment, capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "here\ninterrupted\n")


class Interrupting:
    """Ctrl-C at the moment when native code asks Python for the words of this."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("build", [SchemaSerializer, SchemaValidator])
def test_an_interrupt_that_native_code_calls_its_own_error_ends_the_command(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(args: list[str], standalone_mode: bool) -> None:
        build(core_schema.literal_schema([Interrupting()]))

    monkeypatch.setattr(command_list, "app", command)
    with pytest.raises(KeyboardInterrupt):
        main.run([])


@pytest.mark.parametrize("make_lock", [threading.Lock, threading.RLock])
def test_a_second_interrupt_while_the_first_ends_a_wait(make_lock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(args: list[str], standalone_mode: bool) -> None:
        condition = threading.Condition(make_lock())

        def interrupted(saved: object) -> None:
            raise KeyboardInterrupt

        condition._acquire_restore = interrupted  # type: ignore[attr-defined]
        with condition:
            condition.wait(0.01)

    monkeypatch.setattr(command_list, "app", command)
    with pytest.raises(KeyboardInterrupt):
        main.run([])


def test_another_error_of_native_code_is_our_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the traceback is kept

    def command(args: list[str], standalone_mode: bool) -> None:
        SchemaValidator({"type": "no such type"})

    monkeypatch.setattr(command_list, "app", command)
    assert main.run([]) == EXIT_INTERNAL and "internal error: SchemaError" in capsys.readouterr().err
