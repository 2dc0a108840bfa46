"""`homelab preflight` as people run it: its options, what it prints, what --fix does; and `homelab doctor`."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk
from tests.cli.conftest import complaint

pytestmark = pytest.mark.timeout(300)


def test_the_json_says_what_was_judged_and_what_was_not(desk: Desk) -> None:
    said = desk.json("preflight", "--skip", "power", "--skip", "network.wifi")
    assert said["ok"] is True and said["differences"] == {}
    assert "ssh.login" in said["checks"] and "network.reach" in said["checks"]
    assert "network.wifi" in said["skipped"] and all(name in said["skipped"] for name in ("power.battery", "network.wifi"))
    assert not set(said["checks"]) & set(said["skipped"])
    assert all(set(finding) == {"check", "node", "level", "message", "hint", "fix"} for finding in said["findings"])
    assert [finding for finding in said["findings"] if finding["level"] != "ok"] == []


@pytest.mark.parametrize("option", ["--only", "--skip"])
def test_an_unknown_check_is_named_with_what_was_meant(quiet_desk: Desk, option: str) -> None:
    assert 'Did you mean "network"?' in complaint(quiet_desk, "preflight", option, "netwrok", code=2)["message"]
    found = complaint(quiet_desk, "preflight", option, "network.mut", code=2)
    assert 'Did you mean "network.mtu"?' in found["message"] and "network.reach" in found["hint"]


@pytest.mark.parametrize("options", [["--fix", "--watch"], ["--yes"], ["--fix"]], ids=" ".join)
def test_options_that_contradict_each_other_are_refused_before_any_node_is_asked(quiet_desk: Desk, options: list[str]) -> None:
    complaint(quiet_desk, "preflight", *options, code=2, as_json=False)


@pytest.mark.parametrize("option", ["--fix", "--watch"])
def test_what_talks_with_people_gives_programs_an_error(quiet_desk: Desk, option: str) -> None:
    assert quiet_desk.json("preflight", option, code=2)["error"]["where"] == f"{option} --json"


def test_the_list_is_json_where_json_is_asked_for() -> None:
    from typer.testing import CliRunner

    from homelab.cli.command_list import app
    from homelab.controller.checks import registry

    found = json.loads(CliRunner().invoke(app, ["preflight", "--list", "--json"]).stdout)
    assert [check["id"] for check in found["checks"]] == [check.id for check in registry.CHECKS]
    assert all(set(check) == {"id", "title", "worst"} for check in found["checks"])


def test_the_list_needs_no_cluster(quiet_desk: Desk) -> None:
    said = quiet_desk.homelab("preflight", "--list", "--cluster", "not-there.toml").stdout
    assert "| `network.reach` |" in said


def _damage(lab: Lab, node: str) -> str:
    """Change one byte of the code that was shipped to a node: something --fix can mend without root. Returns the file."""
    workdir = lab.state.node(node).workdir
    folder = os.path.join(workdir, "code")
    newest = max((os.path.join(folder, name) for name in os.listdir(folder)), key=os.path.getmtime)
    file = os.path.join(newest, "homelab", "node", "system", "boot_clock.py")
    with open(file, "a") as stream:
        stream.write("\n# changed\n")
    return file


def test_fix_runs_what_it_shows_and_looks_again(desk: Desk, cli_lab: Lab) -> None:
    desk.homelab("preflight")
    file = _damage(cli_lab, "node2")
    (bad,) = [finding for finding in desk.json("preflight", code=1)["findings"] if finding["level"] != "ok"]
    assert (bad["node"], bad["check"], bad["level"]) == ("node2", "python.code", "fail")
    said = desk.homelab("preflight", "--fix", "--yes").stdout
    assert bad["fix"] in said and "Ready to train" in said
    assert "# changed" not in Path(file).read_text()


@pytest.mark.thorough
def test_fix_asks_and_does_nothing_on_no(desk: Desk, cli_lab: Lab) -> None:
    desk.homelab("preflight")
    file = _damage(cli_lab, "node1")
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "homelab", "preflight", "--fix", "--only", "python"], cwd=desk.folder, stdin=terminal,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "HOMELAB_CLUSTER": str(desk.cluster)},
    )  # fmt: skip
    os.write(controller, b"n\n")
    said, _ = process.communicate(timeout=60)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 1 and "run it?" in said
    assert "# changed" in Path(file).read_text()
    desk.homelab("preflight", "--fix", "--yes", "--only", "python")


def test_watch_ends_when_the_last_failure_is_mended(desk: Desk, cli_lab: Lab) -> None:
    desk.homelab("preflight")
    _damage(cli_lab, "node2")
    process = subprocess.Popen(
        [sys.executable, "-m", "homelab", "preflight", "--watch", "--only", "python", "--only", "ssh"], cwd=desk.folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "HOMELAB_CLUSTER": str(desk.cluster)},
    )  # fmt: skip
    try:
        assert process.poll() is None
        desk.homelab("preflight", "--fix", "--yes", "--only", "python")
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and b"Ready to train" in said


@pytest.mark.thorough
def test_ctrl_c_ends_the_watching(desk: Desk, cli_lab: Lab) -> None:
    desk.homelab("preflight")
    _damage(cli_lab, "node2")
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "homelab", "preflight", "--watch", "--only", "python"], cwd=desk.folder, stdout=terminal,
        stderr=subprocess.PIPE, env={**os.environ, "HOMELAB_CLUSTER": str(desk.cluster), "TERM": "xterm"},
    )  # fmt: skip
    shown = b""
    deadline = time.monotonic() + 60
    while b"repeating" not in shown and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.2)[0]:
            shown += os.read(controller, 65536)
    assert b"repeating" in shown
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 130 and said.endswith(b"interrupted\n") and b"Traceback" not in said
    desk.homelab("preflight", "--fix", "--yes", "--only", "python")


def test_doctor_prints_the_facts_of_one_node(desk: Desk) -> None:
    said = desk.homelab("doctor", "node1").stdout
    assert "version: 3." in said and "Next: homelab preflight --nodes node1" in said
    document = desk.json("doctor", "node2")
    assert document["facts"]["node"] == "node2" and document["error"] is None
    assert json.dumps(document["facts"]["python"]["packages"]["torch"])


def test_doctor_of_nobody_is_refused(desk: Desk) -> None:
    assert 'Did you mean "node1"?' in complaint(desk, "doctor", "nod1", code=2)["message"]
    complaint(desk, "doctor", "node1,node2", code=2)


def test_doctor_of_a_silent_node_says_what_is_in_the_way(quiet_desk: Desk) -> None:
    said = quiet_desk.json("doctor", "a", code=3)
    assert said["facts"] is None and "port 1" in said["error"]["message"]
