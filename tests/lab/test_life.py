"""Up and down: whatever happens in between, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.lab import Lab, sshd
from homelab.lab.lab_state import STATE_FILE, locked
from tests.lab.conftest import BACKENDS, NAMESPACES, left_since, output, processes_mentioning, traces, wait_until

pytestmark = pytest.mark.timeout(90)


def homelab(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command itself, as a process of its own."""
    return subprocess.run([sys.executable, "-m", "homelab", "lab", *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("backend", [pytest.param("loopback", marks=pytest.mark.thorough), NAMESPACES])  # test_without_root has loopback
def test_the_commands_leave_nothing(backend: Literal["loopback", "namespaces"], tmp_path: Path) -> None:
    before = traces()
    folder = tmp_path / "lab"
    up = homelab("up", str(folder), "--nodes", "2", "--backend", backend)
    assert up.returncode == 0, up.stderr
    assert str(folder / "cluster.toml") in up.stdout
    second = homelab("up", str(folder), "--nodes", "2", "--backend", backend)
    assert second.returncode == 1
    assert "homelab lab status" in second.stderr and "homelab lab down" in second.stderr
    status = json.loads(homelab("status", str(folder), "--json").stdout)
    assert status["running"] and [node["ssh"] for node in status["nodes"]] == [True, True]
    assert "node2" in homelab("status", str(folder)).stdout
    assert processes_mentioning(str(folder))
    down = homelab("down", str(folder))
    assert down.returncode == 0 and "verified" in down.stdout
    assert not processes_mentioning(str(folder))
    assert not folder.exists()
    assert not left_since(before, tmp_path)
    assert homelab("down", str(folder)).returncode == 2
    assert homelab("status", str(folder)).returncode == 2
    assert homelab("fault", str(folder), "node1", "freeze").returncode == 2


@pytest.mark.parametrize("moment", ["state written", pytest.param("first node started", marks=pytest.mark.thorough), "last node started"])
@pytest.mark.parametrize("backend", [pytest.param("loopback", marks=pytest.mark.thorough), NAMESPACES])
def test_up_killed_in_the_middle(backend: Literal["loopback", "namespaces"], moment: str, tmp_path: Path) -> None:
    before = traces()
    folder = tmp_path / "lab"
    reached = {
        "state written": folder / STATE_FILE,
        "first node started": folder / "nodes" / "node1" / "init.json",
        "last node started": folder / "nodes" / "node3" / "init.json",
    }[moment]
    starting = subprocess.Popen([sys.executable, "-m", "homelab", "lab", "up", str(folder), "--backend", backend])
    deadline_polls = 0
    while not reached.exists():  # no pause: the moment is short
        deadline_polls += 1
        assert starting.poll() is None, "up ended before it could be killed"
    starting.send_signal(signal.SIGKILL)
    starting.wait(timeout=10)
    assert json.loads((folder / STATE_FILE).read_text())["phase"] == "starting"
    assert "interrupted" in homelab("status", str(folder)).stdout
    down = homelab("down", str(folder))
    assert down.returncode == 0, down.stderr
    assert not processes_mentioning(str(folder))
    assert not left_since(before, tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_up_cleans_a_dead_lab_first(backend: Literal["loopback", "namespaces"], tmp_path: Path) -> None:
    before = traces()
    folder = tmp_path / "lab"
    dead = Lab.up(folder, nodes=2, backend=backend)
    data = json.loads((folder / STATE_FILE).read_text())
    data["boot_id"] = "the boot before this one"
    (folder / STATE_FILE).write_text(json.dumps(data))
    assert dead.status()["note"] == "the machine was restarted since"
    with pytest.raises(HomelabError, match="restarted"):
        dead.fault("node1", "freeze")
    said: list[str] = []
    lab = Lab.up(folder, nodes=1, backend=backend, tell=said.append)
    assert said == [f"cleaning up lab {dead.state.id} first: the machine was restarted"]
    assert not processes_mentioning(dead.state.id)
    assert output(lab, "node1", "echo new") == "new"
    lab.down()
    assert not left_since(before, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_up_that_fails_leaves_nothing(backend: Literal["loopback", "namespaces"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()

    def fail(*_: object) -> None:
        raise HomelabError("sshd did not answer")

    monkeypatch.setattr(sshd, "wait_for_banner", fail)
    with pytest.raises(HomelabError, match="did not answer"):
        Lab.up(tmp_path / "lab", nodes=2, backend=backend)
    assert not (tmp_path / "lab").exists()
    assert not processes_mentioning(str(tmp_path / "lab"))
    assert not left_since(before, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_down_finds_what_lost_its_first_process(backend: Literal["loopback", "namespaces"], tmp_path: Path) -> None:
    before = traces()
    lab = Lab.up(tmp_path / "lab", nodes=1, backend=backend)
    output(lab, "node1", f"setsid {sys.executable} -c 'import time; time.sleep(600)' >/dev/null 2>&1 </dev/null & exit 0")
    os.kill(lab.status()["nodes"][0]["first_process"], signal.SIGKILL)
    wait_until(lambda: lab.status()["nodes"][0]["power"] == "off")
    lab.down()
    assert not processes_mentioning(lab.state.id)
    assert not processes_mentioning(str(lab.folder))
    assert not left_since(before, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_down_of_a_frozen_lab(backend: Literal["loopback", "namespaces"], tmp_path: Path) -> None:
    before = traces()
    lab = Lab.up(tmp_path / "lab", nodes=2, backend=backend)
    lab.fault("node1", "freeze")
    lab.fault("node2", "power-cut")
    lab.down()
    assert not left_since(before, tmp_path)
    assert not processes_mentioning(str(lab.folder))


def test_homes_are_kept_on_demand_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    lab = Lab.up(folder, nodes=1, backend="loopback")
    output(lab, "node1", "mkdir -p homelab/runs/one && echo 3.1 > homelab/runs/one/loss")
    lab.down(keep_files=True)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"nodes/.homelab-lab", "nodes/node1/sshd.log", "nodes/node1/home/homelab/runs/one/loss"}
    with Lab.up(folder, nodes=1, backend="loopback") as again:
        assert output(again, "node1", "cat homelab/runs/one/loss") == "3.1"
    assert not folder.exists()


@pytest.mark.parametrize("name", ["cluster.toml", "known_hosts", "keys", "nodes"])
def test_files_of_others_are_not_touched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir() if name in ("keys", "nodes") else (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"no lab made: {name}"):
        Lab.up(tmp_path, nodes=1, backend="loopback")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_down_keeps_what_it_did_not_make(tmp_path: Path) -> None:
    lab = Lab.up(tmp_path / "lab", nodes=1, backend="loopback")
    (lab.folder / "notes.txt").write_text("mine")
    assert not lab.down().folder_removed
    assert [path.name for path in lab.folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 1000},
        {"names": ["a", "a"]},
        {"names": ["../up"]},
        {"names": ["-x"]},
        {"names": []},
        {"cpu": [0.5, 0.5]},
        {"cpu": [0.0, 0.5, 0.5]},
        {"cpu": [float("nan")]},
        {"rate": "1gbit"},
        {"backend": "loopbak"},
    ],
)
def test_wrong_wishes_leave_nothing(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Lab.up(tmp_path / "lab", **{"backend": "loopback", **wrong})  # type: ignore[arg-type]
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("name", ["file", "file/lab"])
def test_a_file_is_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError):
        Lab.up(tmp_path / name, nodes=1, backend="loopback")
    assert (tmp_path / "file").read_text() == "mine"


def test_one_up_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(HomelabError, match="another command is changing"):
        Lab.up(tmp_path, nodes=1, backend="loopback")


def test_a_folder_sshd_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="control characters"):
        Lab.up(tmp_path / "50%", nodes=1, backend="loopback")


def test_a_taken_port_is_avoided(tmp_path: Path) -> None:
    with Lab.up(tmp_path / "one", nodes=1, backend="loopback") as one, Lab.up(tmp_path / "two", nodes=2, backend="loopback") as two:
        assert one.nodes[0].port != two.nodes[0].port
        assert output(two, "node1", "pwd") == two.nodes[0].home


def test_missing_programs_are_named_with_the_command_that_installs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homelab.lab.tools._SEARCH", str(tmp_path))
    (tmp_path / "apt").touch(mode=0o755)
    with pytest.raises(HomelabError, match="sshd, ssh-keygen") as error:
        Lab.up(tmp_path / "lab", nodes=1, backend="loopback")
    assert "apt install openssh-server openssh-client" in error.value.hint
    assert not (tmp_path / "lab").exists()


def test_an_sshd_that_is_silent_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "sshd.log"
    log.write_text("first\nerror: Bind to port 22 on 127.0.0.2 failed\n")
    with pytest.raises(HomelabError, match="Bind to port 22"):
        sshd.wait_for_banner("127.0.0.99", 1, log, "node9", timeout_s=0.1)
