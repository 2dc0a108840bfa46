"""`python -m scripts.practice.misconfigurations`: one at a time, held until it is told to end, and undone then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab
from tests.lab.conftest import needs_namespaces

pytestmark = pytest.mark.timeout(90)
PROGRAM = [sys.executable, "-m", "scripts.practice.misconfigurations"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes of the loopback backend. The folder has a space in its name."""
    with Lab.up(tmp_path_factory.mktemp("by hand") / "lab", nodes=2, backend="loopback") as started:
        yield started


@contextlib.contextmanager
def held(lab: Lab, node: str, name: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process that holds it, and the line in which it says what to type next."""
    with subprocess.Popen([*PROGRAM, str(lab.folder), node, name], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert process.stdout.readline() == "Ctrl-C undoes it.\n"
        try:
            yield process, line
        finally:
            process.send_signal(signal.SIGTERM)


def refused(*words: str) -> str:
    """What it says where it injects nothing."""
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode and not done.stdout
    return done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_is_held_until_it_is_told_to_end(lab: Lab, number: signal.Signals) -> None:
    before = lab.cluster_file.read_text()
    with held(lab, "node2", "wrong-user") as (process, line):
        assert line.startswith("Next: homelab preflight --cluster '") and line.endswith("(found by ssh.login)\n")
        assert 'user = "nobody"' in lab.cluster_file.read_text()
        process.send_signal(number)
        assert process.wait(60) == 0
    assert lab.cluster_file.read_text() == before


def test_one_at_a_time(lab: Lab) -> None:
    with held(lab, "node2", "wrong-user"):
        assert "one at a time" in refused(str(lab.folder), "node1", "key-missing")


def test_what_cannot_be_is_refused_with_what_to_type(lab: Lab) -> None:
    folder = str(lab.folder)
    assert 'Did you mean "battery"' in refused(folder, "node2", "batery")
    assert 'no node "node7"' in refused(folder, "node7", "wrong-user")
    assert "--backend namespaces" in refused(folder, "node2", "battery")
    assert "--list lists them" in refused(folder, "node2")
    lab.fault("node2", "power-cut")
    try:
        assert "node2 has no power" in (text := refused(folder, "node2", "wrong-user")) and "power-on" in text
    finally:
        lab.fault("node2", "power-on")


@needs_namespaces
@pytest.mark.namespaces
def test_where_it_makes_sense(isolated: Lab) -> None:
    text = refused(str(isolated.folder), "node2", "rendezvous-blocked")
    assert "on the head only, which is node1" in text and text.endswith("node1 rendezvous-blocked\n")
    with held(isolated, "node2", "hot-card") as (_, line):
        assert "gpu.throttle" in line
        assert "gpus = [{" in isolated.cluster_file.read_text(), "the card that is hot is there"
    assert "gpus = [{" not in isolated.cluster_file.read_text()


def test_the_list_names_every_one_with_its_checks() -> None:
    lines = subprocess.run([*PROGRAM, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len({line.split()[0] for line in lines}) == 107
    assert next(line for line in lines if line.startswith("battery ")).endswith("(needs root): power.battery")


def test_it_is_undone_where_the_terminal_that_asked_is_gone(lab: Lab) -> None:
    before = lab.cluster_file.read_text()
    reader, writer = os.pipe()
    os.close(reader)
    holder = subprocess.Popen([*PROGRAM, str(lab.folder), "node2", "wrong-user"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert holder.wait(60) == 0, holder.stderr.read() if holder.stderr else ""
    assert lab.cluster_file.read_text() == before


# Plays `hold` in children, which tell themselves to end at the first, second, third, ... call behind the answer.
TOLD_AT_EACH_CALL = """
import contextlib, os, signal, sys, time, types
from pathlib import Path
from scripts.practice.misconfigurations import __main__ as by_hand, catalogue

def play(folder, position, ready):
    calls = []
    def count(frame, event, argument):
        if event in ("call", "c_call"):
            calls.append(event)
            if len(calls) == position:
                os.kill(os.getpid(), signal.SIGTERM)
    def tell(*words, **options):
        os.write(ready, b"1")
        sys.setprofile(count)
    by_hand.Lab = types.SimpleNamespace(open=lambda folder: types.SimpleNamespace(cluster_file=folder))
    catalogue.find = lambda name: types.SimpleNamespace(name=name, needs=(), checks=())
    catalogue.injected = lambda *_: contextlib.nullcontext()
    by_hand.check, by_hand.print = (lambda *_: None), tell
    by_hand.hold(folder, "node1", "some-fault")
    os._exit(0)

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
