"""Nodes that never come to an end, under every command that asks nodes: real processes, a node behind a real sshd and one on this machine.

Every command ends soon after a SIGTERM, leaves no process of its own, and keeps its memory. The thorough version takes all commands.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from homelab.shared.protocol.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from tests.controller.remote import desks
from tests.controller.remote.places import Places, of_this_test
from tests.controller.remote.test_hostile_node import COMMANDS

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("sshd") is None and not os.path.exists("/usr/sbin/sshd"), reason="no sshd"),
]
LIMIT_S, MOST_KILOBYTES = 5.0, 500_000
TAKEN_S = 3.0  # so long a command may take of what never ends
# How an agent answers; tower one long line, laptop line by line. "$mark" begins an answer.
WAYS = {
    "never answers": {"tower": "exec sleep 600", "laptop": 'echo "$mark"; exec sleep 600'},
    "a byte a second": dict.fromkeys(desks.NAMES, 'echo "$mark"; while sleep 1; do printf x; done'),
    "an endless answer": {"tower": """echo "$mark"; tr '\\0' x </dev/zero""", "laptop": """echo "$mark"; yes '{"say": "x"}'"""},
}
QUICK = [("never answers", "status"), ("a byte a second", "merge"), ("an endless answer", "recover")]
_AGENT = """#!/bin/sh
case "$*" in *"-m homelab.node "*) ;; *) exec {python} "$@" ;; esac
for mark; do :; done
echo $$ >>{asked}
{way}
"""


class Desk:
    """The desk of two nodes that answer in one of `WAYS`."""

    def __init__(self, folder: Path, places: Places) -> None:
        self.folder, self.places = folder / "desk", places
        self.folder.mkdir()
        self.asked = folder / "asked"
        workdirs = {name: folder / "nodes" / name for name in desks.NAMES}
        desks.write_runs(self.folder, workdirs)
        places.config.write_text(places.block("tower", "tower"))
        hosts = {"tower": f'tower"\nuser = "{getpass.getuser()}', "laptop": "local"}
        desks.write(self.folder, workdirs, {name: f'host = "{hosts[name]}"\npython = "{folder / name}"\n' for name in desks.NAMES})
        file = self.folder / "cluster.toml"
        file.write_text(f'[cluster]\nknown_hosts = "{places.known_hosts}"\n{file.read_text()}')

    def answer(self, way: str) -> None:
        """From now on both nodes answer so."""
        self.asked.unlink(missing_ok=True)
        for name in desks.NAMES:
            program = self.folder.parent / name
            program.write_text(_AGENT.format(python=sys.executable, asked=self.asked, way=WAYS[way][name]))
            program.chmod(0o755)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """The command as a person starts it."""
        environment = {
            **os.environ, "HOMELAB_CLUSTER": "cluster.toml", "HOMELAB_RUNS": "runs", "HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[3]), "OF_THIS_TEST": str(self.folder),
        }  # fmt: skip
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "homelab", *command],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                preexec_fn=_heed,
            )

    def left(self) -> list[psutil.Process]:
        """What the command has started here and what still runs."""
        return [process for process in psutil.process_iter() if _environment(process).get("OF_THIS_TEST") == str(self.folder)]

    def kill(self) -> None:
        """End what is left, the agents with it."""
        agents = (
            [psutil.Process(int(pid)) for pid in self.asked.read_text().split() if psutil.pid_exists(int(pid))]
            if self.asked.exists()
            else []
        )
        for process in [*self.left(), *agents]:
            with contextlib.suppress(psutil.Error):
                for one in [*process.children(recursive=True), process]:
                    one.kill()


def _heed() -> None:
    """What a program that ignores SIGTERM has started ignores it, too: not so here."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except psutil.Error:
        return {}


def _peak_kilobytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return next((int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")), 0)
    return 0


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    (tmp_path / "places").mkdir()
    places = of_this_test(tmp_path / "places", monkeypatch)
    try:
        places.add("tower")
        made = Desk(tmp_path, places)
        yield made
        made.kill()
    finally:
        places.close()


def ended(desk: Desk, way: str, command: list[str]) -> tuple[float, int, int, str]:
    """Seconds from the SIGTERM to the end (0 where it ended before), exit code, peak in kilobytes, and what it said."""
    desk.answer(way)
    process = desk.start(command)
    until_s, peak = time.monotonic() + 60, 0
    while process.poll() is None and time.monotonic() < until_s:
        peak = max(peak, _peak_kilobytes(process.pid))
        if desk.asked.exists() and until_s > time.monotonic() + TAKEN_S:
            until_s = time.monotonic() + (TAKEN_S if way == "an endless answer" else 0.5)
        time.sleep(0.02)
    began_s = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        seconds = time.monotonic() - began_s
    else:
        seconds = 0.0
    return seconds, process.returncode, peak, (desk.folder / "said").read_text(errors="replace")


def judge(desk: Desk, way: str, name: str) -> str:
    """One line about the command; raises AssertionError where it does not end as it must."""
    seconds, code, peak, said = ended(desk, way, COMMANDS[name])
    case = f"{name}, {way}: exit code {code}, {seconds:.1f} s after SIGTERM, peak {peak // 1000} MB"
    print(f"{case}\n{said[-1500:]}")
    # What must be done whole ends with its own code, also after a signal (`signals.held`).
    assert code in (EXIT_INTERRUPTED, EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_UNREACHABLE), case
    assert seconds < LIMIT_S and peak < MOST_KILOBYTES and "Traceback (most recent" not in said and "internal error" not in said, case
    gone_s = time.monotonic() + 2.0  # a process that was told to end
    while (left := desk.left()) and time.monotonic() < gone_s:
        time.sleep(0.02)
    assert [process.cmdline() for process in left] == [], case
    return case if desk.asked.exists() else f"{case}, no agent asked"


@pytest.mark.thorough  # about 8 s each; where no processor is left for the command, it can end later
@pytest.mark.parametrize(("way", "name"), QUICK, ids=[name for _, name in QUICK])
def test_a_command_ends_though_its_nodes_do_not(desk: Desk, way: str, name: str) -> None:
    assert "no agent asked" not in judge(desk, way, name)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_though_its_nodes_do_not(desk: Desk, way: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = judge(desk, way, name)
    with capsys.disabled():
        print(f"\n{case}")
