"""A misconfiguration that a user injects: a process holds it, one at a time, and undoes it when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.lab import Lab, fault_injection, held_fault, procfs
from tests.lab.conftest import needs_namespaces, wait_until

pytestmark = pytest.mark.timeout(90)
ENTRIES = {entry["name"]: entry for entry in fault_injection.entries()}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes of the loopback backend. The folder has a space in its name."""
    with Lab.up(tmp_path_factory.mktemp("held fault") / "lab", nodes=2, backend="loopback") as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        folder = request.getfixturevalue("lab").folder
        held_fault.end(folder)
        assert not list(folder.glob("fault.*"))


def test_it_is_held_until_it_is_undone(lab: Lab) -> None:
    before = lab.cluster_file.read_text()
    lines = fault_injection.inject(lab, "node2", "wrong-user")
    assert lines[0].startswith("Next: homelab preflight --cluster '") and "ssh.login" in lines[0]
    assert lines[1].startswith("Undo: homelab lab fault ") and lines[1].endswith("node2 wrong-user --undo")
    assert 'user = "nobody"' in lab.cluster_file.read_text()
    status = lab.status()["fault"]
    assert (status["name"], status["node"]) == ("wrong-user", "node2")
    fault_injection.undo(lab, "node2", "wrong-user")
    assert lab.cluster_file.read_text() == before
    assert lab.status()["fault"] is None


def test_one_at_a_time(lab: Lab) -> None:
    fault_injection.inject(lab, "node2", "wrong-user")
    with pytest.raises(InputError, match="node2 has wrong-user already") as refused:
        fault_injection.inject(lab, "node1", "key-missing")
    assert refused.value.hint and refused.value.hint.endswith("node2 wrong-user --undo")
    with pytest.raises(InputError, match="node1 does not have key-missing; node2 has wrong-user"):
        fault_injection.undo(lab, "node1", "key-missing")


def test_what_is_not_there_cannot_be_undone(lab: Lab) -> None:
    with pytest.raises(InputError, match="node2 does not have wrong-user"):
        fault_injection.undo(lab, "node2", "wrong-user")
    with pytest.raises(InputError, match="kill-worker cannot be undone"):
        fault_injection.undo(lab, "node2", "kill-worker")


def test_a_fault_that_needs_namespaces_says_so(lab: Lab) -> None:
    with pytest.raises(HomelabError, match="needs a lab of the namespaces backend") as refused:
        fault_injection.inject(lab, "node2", "battery")
    assert refused.value.hint and "--backend namespaces" in refused.value.hint
    assert held_fault.read(lab.folder) is None


def test_unknown_names(lab: Lab) -> None:
    with pytest.raises(InputError, match=r'no fault "batery"\. Did you mean "?battery'):
        fault_injection.inject(lab, "node2", "batery")
    with pytest.raises(InputError, match=r'no fault "freez"\. Did you mean "?freeze'):
        fault_injection.inject(lab, "node2", "freez")
    with pytest.raises(InputError, match='no node "node7"'):
        fault_injection.inject(lab, "node7", "wrong-user")


def test_a_node_without_power_has_no_misconfiguration(lab: Lab) -> None:
    lab.fault("node2", "power-cut")
    try:
        with pytest.raises(HomelabError, match="node2 has no power"):
            fault_injection.inject(lab, "node2", "wrong-user")
    finally:
        fault_injection.undo(lab, "node2", "power-cut")
    assert lab.status()["nodes"][1]["power"] == "on"


def test_when_its_process_was_killed_nothing_can_undo_it(lab: Lab) -> None:
    before = lab.cluster_file.read_text()
    fault_injection.inject(lab, "node2", "wrong-user")
    held = held_fault.read(lab.folder)
    assert held is not None
    os.kill(held.pid, signal.SIGKILL)
    wait_until(lambda: not held.is_held())
    with pytest.raises(HomelabError, match="cannot be undone") as refused:
        fault_injection.undo(lab, "node2", "wrong-user")
    assert refused.value.hint and "homelab lab down" in refused.value.hint
    lab.cluster_file.write_text(before)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": "x"}'])
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    (tmp_path / held_fault.RECORD_FILE).write_text(text)
    with pytest.raises(HomelabError, match="cannot be undone"):
        held_fault.undo(tmp_path, "node2", "wrong-user")
    held_fault.end(tmp_path)
    assert held_fault.read(tmp_path) is None


def test_down_undoes_it_first(tmp_path: Path) -> None:
    lab = Lab.up(tmp_path / "lab", nodes=1, backend="loopback")
    fault_injection.inject(lab, "node1", "no-power")
    held = held_fault.read(lab.folder)
    assert held is not None
    assert lab.down().folder_removed
    assert procfs.read(held.pid) is None


@needs_namespaces
@pytest.mark.namespaces
def test_where_it_makes_sense(isolated: Lab) -> None:
    with pytest.raises(InputError, match="on the head only, which is node1") as refused:
        fault_injection.inject(isolated, "node2", "rendezvous-blocked")
    assert refused.value.hint and refused.value.hint.endswith("node1 rendezvous-blocked")
    lines = fault_injection.inject(isolated, "node2", "hot-card")
    assert "gpu.throttle" in lines[0]
    assert "gpus = [{" in isolated.cluster_file.read_text(), "the card that is hot is there"
    fault_injection.undo(isolated, "node2", "hot-card")
    assert "gpus = [{" not in isolated.cluster_file.read_text()


def test_the_list_names_every_fault_once() -> None:
    assert len(ENTRIES) == len(fault_injection.entries()) > 100
    assert all(entry["found_by"] or entry["when"] == "during a run" for entry in ENTRIES.values())
    assert ENTRIES["battery"]["needs"] == ["namespaces"] and ENTRIES["wrong-user"]["needs"] == []
    assert ENTRIES["freeze"]["undo"] and not ENTRIES["kill-worker"]["undo"]


def test_it_is_undone_where_the_terminal_that_asked_is_gone(lab: Lab) -> None:
    before = lab.cluster_file.read_text()
    reader, writer = os.pipe()
    os.close(reader)
    holder = subprocess.Popen(
        [sys.executable, "-m", held_fault.HOLDER, str(lab.folder), "node2", "wrong-user"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert holder.wait(60) == 0, holder.stderr.read() if holder.stderr else ""
    assert held_fault.read(lab.folder) is None
    assert lab.cluster_file.read_text() == before


def test_a_fault_that_does_not_come_is_waited_for_only_so_long(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_fault, "START_TIMEOUT_S", 0.0)
    with pytest.raises(HomelabError, match="wrong-user was not injected within 0 s"):
        held_fault.start(lab.folder, "node2", "wrong-user")
    assert held_fault.read(lab.folder) is None


# Plays `holder.main` in children, which tell themselves to end at the first, second, third, ... call behind the answer.
TOLD_AT_EACH_CALL = """
import contextlib, os, signal, sys, time, types
from pathlib import Path
from homelab.lab.misconfigurations import catalogue, holder

def play(folder, position, ready):
    calls = []
    def count(frame, event, argument):
        if event in ("call", "c_call"):
            calls.append(event)
            if len(calls) == position:
                os.kill(os.getpid(), signal.SIGTERM)
    def tell(**answer):
        os.write(ready, b"1")
        sys.setprofile(count)
    holder.Lab = types.SimpleNamespace(open=lambda folder: types.SimpleNamespace(cluster_file=folder))
    catalogue.find = lambda name: types.SimpleNamespace(name=name, needs=())
    catalogue.injected = lambda *_: contextlib.nullcontext()
    holder.check, holder._tell = (lambda *_: None), tell
    code = holder.main(folder, "node1", "some-fault")
    os._exit(code)

for position in range(1, 16):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        play(Path(sys.argv[1]), position, writer)
    os.close(writer)
    os.read(reader, 1)
    deadline = time.monotonic() + 10
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            sys.exit(f"told at call {position}, and it waits for ever")
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)  # it may sleep already, before that call
    assert ended[1] == 0, (position, ended)
"""


def test_told_to_end_at_any_point_it_ends(tmp_path: Path) -> None:
    """A signal that comes while it begins to wait: told by the lock of its own wait, it would wait for ever."""
    done = subprocess.run([sys.executable, "-c", TOLD_AT_EACH_CALL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert held_fault.read(tmp_path) is None


def test_one_that_does_not_end_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_fault, "UNDO_TIMEOUT_S", 0.0)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeper, held_fault.HOLDER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"1"
        (tmp_path / held_fault.RECORD_FILE).write_text(json.dumps({"name": "some-fault", "node": "node1", "pid": process.pid}))
        with pytest.raises(HomelabError, match=f"process {process.pid} was told to undo it, and has not within 0 s"):
            held_fault.undo(tmp_path, "node1", "some-fault")
        process.kill()
