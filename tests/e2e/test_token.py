"""A token that is planted where a person types `homelab launch` is found nowhere, from the launch to the end, a recovery included."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from homelab.cli.command_list import NAMES
from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, read_rest, wait_until
from tests.e2e.conftest import recipe

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.namespaces, pytest.mark.timeout(300)]
TOKEN = "xyzzy-Q7rT9pLm4242-planted"  # like nothing that a pattern would know


class Hunt(threading.Thread):
    """Looks at the arguments and the environment of every process, again and again. `spared`: a process that was given it by its person."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.spared, self.hits, self.looks, self.is_over = 0, set[str](), 0, False
        self.processes: set[int] = set()

    def run(self) -> None:
        while not self.is_over:
            for pid in procfs.processes():
                for name in ("cmdline", "environ"):
                    try:
                        content = Path(f"/proc/{pid}/{name}").read_bytes()
                    except OSError:
                        continue
                    self.processes.add(pid)
                    if TOKEN.encode() in content and pid != self.spared:
                        self.hits.add(f"{name}: {procfs.command_line(pid)}")
            self.looks += 1
            time.sleep(0.01)


def holders(*folders: Path) -> list[Path]:
    """The files that hold the token."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 30
    return [path for path in files if TOKEN.encode() in path.read_bytes()]


def token_files(run: Run) -> list[Path]:
    """Where a node has it: each node has its own memory, which its processes show."""
    pids = [pid for node in run.lab.nodes for pid in run.lab.processes_of(node.name)]
    found = [
        file
        for pid in pids
        for place in ("dev/shm", "run", "root")
        for file in Path(f"/proc/{pid}/root/{place}").glob(f"*homelab*/{run.name}-*/HF_TOKEN")
    ]
    return list({(file.stat().st_dev, file.stat().st_ino): file for file in found}.values())


def test_it_is_found_nowhere(lab: Lab, model: Path, desk: Desk) -> None:
    mine = Desk(desk.folder, lab, supervise=True)
    mine.write("token.toml", recipe(model, length="epochs = 40").replace("every_steps = 10", "every_steps = 4"))
    said: list[str] = []
    hunt = Hunt()
    launching = mine.spawn("launch", "token.toml", "--skip", "collective", HF_TOKEN=TOKEN)
    hunt.spared = launching.pid
    hunt.start()
    try:
        assert launching.stdout is not None
        said.append(launching.stdout.readline())
        environ = Path(f"/proc/{launching.pid}/environ").read_bytes()
        assert TOKEN.encode() not in environ and b"HF_TOKEN=*****" in environ, "the command itself shows it no more"
        said.append(read_rest(launching, 100))
        assert launching.returncode == 0, said
        hunt.spared = 0
        run = Run(lab, mine.json("runs")["runs"][0]["name"])
        run.wait_for_step(1, 6)
        assert len(token_files(run)) == 3 and {file.read_text() for file in token_files(run)} == {TOKEN}
        lab.fault("node2", "kill-worker")
        wait_until(lambda: 2 in run.attempts(), 100, lambda: run.logs(1))
        run.wait_for_step(2, 8)
        assert len(token_files(run)) == 3, "the supervisor brings it to the recovery"
        # As a program that says its token would do it; our worker does not.
        log = next(run.folder("node1").glob("attempts/2/nodes/node1/logs/*/*/0/stderr.log"))
        agent_log = run.folder("node1") / "attempts/2/nodes/node1/agent.log"
        for file in (log, agent_log):
            with file.open("a") as stream:
                stream.write(f"401 for token {TOKEN}\n")
        said += [
            mine.homelab(*words, code=None).stdout
            for words in (["logs", "--rank", "0"], ["status", "--once"], ["status", "--json"], ["doctor", "node1"])
        ]
        assert "401 for token ***" in said[-4], "the node hides it from a command that does not know it"
        said += [mine.homelab(name, code=None).stdout for name in NAMES if name in ("report", "export")]
        said.append(mine.homelab("plan", "token.toml", "--why", code=None).stdout)
        wait_until(lambda: mine.json("status", code=None)["state"] == "done", 100, lambda: run.logs(2))
        said += [
            mine.homelab(*words, code=None).stdout
            for words in (["why", "--attempt", "1"], ["status", "--once"], ["logs"], ["runs"], ["fetch"])
        ]
    finally:
        hunt.is_over = True
        hunt.join()
    assert hunt.looks > 50 and len(hunt.processes) > 20
    assert not hunt.hits
    assert not [text for text in said if TOKEN in text]
    assert f"401 for token {'*' * len(TOKEN)}" in agent_log.read_text()
    assert not holders(desk.folder, lab.folder)
    assert not token_files(run)
    if shutil.which("journalctl"):
        journal = subprocess.run(["journalctl", "--since", "-10min", "--no-pager", "-q"], capture_output=True, text=True, errors="replace")
        assert TOKEN not in journal.stdout
