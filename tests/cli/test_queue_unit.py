"""`homelab queue install` on a real systemd: the unit runs the queue, brings back a runner that was killed, and leaves runs alone when it is stopped.

The manager of a user's units runs in namespaces of its own, so this machine needs no systemd at its boot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from homelab.controller.features.queue.service import NAME
from scripts.practice.desk import REPOSITORY, Desk, wait_until
from tests.lab.conftest import namespaces_missing

MANAGER = Path("/lib/systemd/systemd")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.namespaces,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(namespaces_missing()) or not MANAGER.exists(), reason=namespaces_missing() or "no systemd"),
]
RESTART_S = 60  # of the unit
# What a booted machine has, for the manager and for who asks whether there is one.
BOOT = 'mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" && "$0" --user'

Inside = Callable[..., str]


@pytest.fixture
def inside(desk: Desk) -> Iterator[Inside]:
    """Runs a command beside a manager of units; its output. The manager and all it has started end with the test."""
    own = {
        "HOME": str(desk.folder / "home"),
        "XDG_RUNTIME_DIR": "/run/user/0",
        "XDG_CONFIG_HOME": str(desk.folder / "home" / "config"),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
    }
    (desk.folder / "home").mkdir()
    words = ["unshare", "--mount", "--pid", "--cgroup", "--fork", "--kill-child", "--mount-proc", "sh", "-c", BOOT, str(MANAGER)]
    with (desk.folder / "manager.log").open("wb") as log:
        manager = subprocess.Popen(words, env=own, stdout=log, stderr=log)
    try:
        wait_until(lambda: bool(psutil.Process(manager.pid).children()), 10.0)
        first = str(psutil.Process(manager.pid).children()[0].pid)

        def run(*command: str) -> str:
            entered = ["nsenter", f"--target={first}", "--mount", "--pid", "--cgroup", f"--wd={desk.folder}", "--", *command]
            done = subprocess.run(entered, env=own, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            return done.stdout

        wait_until(lambda: "running" in run("sh", "-c", "systemctl --user is-system-running || true"), 30.0)
        yield run
    finally:
        manager.kill()
        manager.wait()
        shutil.rmtree(desk.folder / "home", ignore_errors=True)


def test_a_unit_runs_the_queue_and_brings_a_killed_runner_back(desk: Desk, inside: Inside) -> None:
    def homelab(*words: str) -> str:
        return inside(sys.executable, "-m", "homelab", *words, "--cluster", str(desk.cluster), "--runs-dir", str(desk.folder / "runs"))

    def add(name: str, seconds: int) -> None:
        desk.write(f"{name}.py", f"import time\nprint('here', flush=True)\ntime.sleep({seconds})\n")
        desk.write(f"{name}.toml", f'[script]\npath = "{name}.py"\n')
        homelab("queue", "add", f"{name}.toml", "--skip", "collective", "--skip", "model", "--nodes", "node1")

    def state(number: int) -> str:
        jobs = json.loads(homelab("queue", "--json"))["jobs"]
        return str(next(one["state"] for one in jobs if one["number"] == number))

    def runner() -> int:
        return int(inside("systemctl", "--user", "show", "--property=MainPID", "--value", NAME))

    add("first", 0)
    said = homelab("queue", "install")
    following = said.splitlines()[-1].removeprefix("Next: ")
    assert "Nothing is started or enabled yet" in said and following.startswith("systemctl --user daemon-reload && ")
    assert runner() == 0 and state(1) == "waiting"
    inside("sh", "-c", following)  # as the last line says
    wait_until(lambda: state(1) == "done", 100.0)

    killed = runner()
    inside("kill", "-KILL", str(killed))
    add("second", 40)
    wait_until(lambda: runner() not in (0, killed), RESTART_S + 30.0)
    wait_until(lambda: state(2) == "running" and bool(json.loads(homelab("status", "--json"))["run"]), 100.0)
    run = next(one["run"] for one in json.loads(homelab("queue", "--json"))["jobs"] if one["number"] == 2)
    wait_until(lambda: json.loads(homelab("status", run, "--json"))["state"] == "running", 60.0)
    supervisor = json.loads((desk.folder / "runs" / run / "supervisor.json").read_text())["pid"]
    inside("systemctl", "--user", "stop", NAME)
    inside("kill", "-0", str(supervisor))  # only the runner ends with its unit
    assert json.loads(homelab("status", run, "--json"))["state"] == "running"
    inside("systemctl", "--user", "start", NAME)
    wait_until(lambda: state(2) == "done", 100.0)
    assert runner() != 0, "it waits for the next job"
    inside("systemctl", "--user", "disable", "--now", NAME)
    assert runner() == 0
