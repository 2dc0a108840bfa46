"""`--supervise head`: the controller goes to sleep, and the run looks after itself all the same, from its head node."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run import event_log, supervisor_lock
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab, procfs, sshd
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_law import assert_lawful

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(300)]
HEAD = "node1"


@pytest.fixture
def key_of_the_head(lab: Lab) -> Iterator[None]:
    """The head's own key, which the other nodes let in; there is none before and after."""
    folder = Path(lab.state.node(HEAD).home) / ".ssh"
    folder.mkdir(mode=0o700)
    public = sshd.make_key(folder / "id_ed25519", "the head")
    files = [lab.state.node_folder(node) / "authorized_keys" for node in lab.state.nodes if node.name != HEAD]
    before = [file.read_text() for file in files]
    for file, text in zip(files, before, strict=True):
        file.write_text(f"{text}{public}\n")
    yield
    for file, text in zip(files, before, strict=True):
        file.write_text(text)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture(autouse=True)
def no_supervisor_left(lab: Lab) -> Iterator[None]:
    yield
    try:
        wait_until(lambda: not supervisors(lab), 10, lambda: f"left: {supervisors(lab)}")
    finally:
        procfs.send(supervisors(lab), signal.SIGKILL)


def supervisors(lab: Lab) -> list[int]:
    """Supervisors on any node, numbered as this machine sees them."""
    return [pid for node in lab.nodes for pid in lab.processes_of(node.name) if "supervise" in procfs.command_line(pid)]


def place(lab: Lab, run: Run) -> Path:
    return Path(lab.state.node(HEAD).workdir) / "supervised" / run.name


def said(lab: Lab, run: Run) -> dict[str, Any]:
    file = RunPaths(place(lab, run) / "runs" / run.name).supervisor_json
    return dict(json.loads(file.read_text())) if file.exists() else {}


def log(lab: Lab, run: Run) -> str:
    return RunPaths(place(lab, run) / "runs" / run.name).supervisor_log.read_text(errors="replace")


@pytest.mark.thorough
def test_the_controller_sleeps_while_a_worker_dies(desk: Desk, lab: Lab, reference: Run, key_of_the_head: None) -> None:
    run = desk.launch("law.toml", "--supervise", "head")
    # Nothing of it is on the controller, which may be closed now; there it is a program of its own, of the node's own files.
    own = RunPaths(desk.folder / "runs" / run.name)
    assert not own.supervisor_lock.exists() and not supervisor_lock.is_held(own)
    (pid,) = supervisors(lab)
    assert pid in lab.processes_of(HEAD)
    around = procfs.environment(pid)
    assert around["PYTHONPATH"].startswith(lab.state.node(HEAD).workdir) and around["HOME"] == lab.state.node(HEAD).home
    assert "HOMELAB_RUN" not in around
    assert stat.S_IMODE(place(lab, run).stat().st_mode) == 0o700
    assert "identity_file" not in (place(lab, run) / "cluster.toml").read_text()
    assert not list(place(lab, run).rglob("id_*"))

    seen = desk.json("status", run.name)
    assert seen["supervisor"] == f"watching (on {HEAD})", seen["supervisor"]
    refused = desk.json("recover", run.name, code=2)["error"]
    assert "has a supervisor" in refused["message"] and HEAD in refused["where"] and "kill" in refused["hint"]
    assert f"a supervisor on {HEAD} already" in desk.homelab("supervise", run.name).stdout

    run.wait_for_step(1, 13)
    lab.fault("node2", "kill-worker")
    wait_until(lambda: said(lab, run).get("doing") in ("ended", "given up"), 120, lambda: log(lab, run))
    ended = said(lab, run)
    assert (ended["doing"], ended["why"]) == ("ended", "done") and ended["attempt"] > 1 and ended["restarts"], log(lab, run)
    assert not own.plan_json(2).exists()
    wait_until(lambda: not supervisors(lab), 10)
    done = desk.json("status", run.name)  # from here on the controller knows of it, too
    assert (done["state"], done["attempt"], done["supervisor"]) == ("done", ended["attempt"], "")
    assert own.plan_json(2).exists()
    told = [event["text"] for event in desk.json("status", run.name)["events"]]
    assert any(text.startswith("trouble") for text in told) and told.count("done") == 1, told
    why = desk.json("why", run.name, "--attempt", "1")
    assert any(row["text"].startswith("attempt 2 continues") for row in why["since"]), why
    assert_lawful(run, reference, head=HEAD)


@pytest.mark.thorough
def test_it_is_said_when_it_is_gone_and_stop_ends_it(desk: Desk, lab: Lab, key_of_the_head: None) -> None:
    place_of_all = Path(lab.state.node(HEAD).workdir) / "supervised"
    before = set(place_of_all.glob("*"))
    tried = desk.homelab("launch", "sleeper.toml", "--skip", "collective", "--supervise", "head", "--dry-run")
    assert "testing the connections" in tried.stderr and set(place_of_all.glob("*")) == before, "a dry run tries it and leaves nothing"
    run = desk.launch("sleeper.toml", "--supervise", "head")
    run.wait_for_output(1, HEAD, "asleep")
    (pid,) = supervisors(lab)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not supervisors(lab), 10)
    event_log.append(RunPaths(place(lab, run) / "runs" / run.name), event("trouble", because="known to the head alone"))
    for _ in range(2):
        seen = desk.json("status", run.name)
        assert [event["text"] for event in seen["events"]].count("trouble: known to the head alone") == 1, seen["events"]
    assert "trouble: known to the head alone" in [event["what"] for event in event_log.lines(RunPaths(desk.folder / "runs" / run.name))]
    assert seen["supervisor"] == "" and any(f"homelab recover {run.name}" in note for note in seen["notes"]), seen["notes"]

    desk.homelab("stop", run.name)
    recovered = desk.json("recover", run.name, "--from-scratch", "--supervise", "head")
    assert recovered["attempt"] == 2
    assert supervisors(lab) and desk.json("status", run.name)["supervisor"].endswith(f"(on {HEAD})")
    stopped = desk.json("stop", run.name)
    assert stopped["clean"] and not supervisors(lab)
    assert (said(lab, run)["doing"], run.attempts()) == ("ended", [1, 2]), log(lab, run)


@pytest.mark.parametrize("option", [(), ("--dry-run",)], ids=["launch", "dry run"])
def test_a_launch_that_cannot_have_it_starts_nothing(desk: Desk, lab: Lab, option: tuple[str, ...]) -> None:
    folders = (desk.folder / "runs", Path(lab.state.node(HEAD).workdir) / "supervised")
    before = [set(folder.glob("*")) for folder in folders]
    error = desk.json("launch", "sleeper.toml", "--skip", "collective", "--supervise", "head", *option, code=1)["error"]
    assert f"{HEAD} does not reach node2 and node3" in error["message"], error
    assert "ssh-keygen" in error["hint"] and "authorized_keys" in error["hint"] and "--supervise here" in error["hint"]
    assert [set(folder.glob("*")) for folder in folders] == before
