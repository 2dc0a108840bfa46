"""Where a run has its supervisor, and what a person hears of one that did not start. No process is started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import placement, remote_supervisor
from homelab.controller.attempt.placement import SupervisorPlacement
from homelab.controller.attempt.remote_supervisor import SupervisorPlace
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.run import store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return builders.run_folder(tmp_path / "runs")


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path / "nodes")


class Process:
    """What `subprocess.Popen` gives, with an exit code that is known at once; None: it does not end."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode
        self.was_killed = False

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.was_killed = True


def starts(monkeypatch: pytest.MonkeyPatch, returncode: int | None, said: bytes = b"") -> tuple[Process, list[Any]]:
    """Processes are not started; what would be is listed."""
    process, commands = Process(returncode), []

    def popen(command: Any, stdout: Any, **_: Any) -> Process:
        commands.append(command)
        stdout.write(said)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    return process, commands


class View:
    """What the person is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @contextmanager
    def progress(self) -> Iterator[Say]:
        yield lambda text: None

    def supervised(self, note: str) -> None:
        self.told.append(note)

    def unsupervised(self, error: HomelabError) -> None:
        self.told.append(error)


class OnHead:
    """`remote_supervisor`, with its acts written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.acts: list[str] = []
        monkeypatch.setattr(
            remote_supervisor, "prepare", lambda fleet, request, say: self._did("prepare", SupervisorPlace(request.head, builders.RUN))
        )
        monkeypatch.setattr(remote_supervisor, "discard", lambda fleet, place: self._did("discard"))
        monkeypatch.setattr(remote_supervisor, "start", lambda fleet, paths, place, say: self._did("start", "~/homelab/log"))

    def _did(self, act: str, answer: Any = None) -> Any:
        self.acts.append(act)
        return answer


def request(head: str = "tower") -> Any:
    return remote_supervisor.SupervisorRequest(run=builders.RUN, head=head, nodes=builders.NAMES, silent=(), addresses={})


def test_it_is_started_with_the_nodes_that_it_may_use(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, commands = starts(monkeypatch, 0)
    placement.start(paths, tmp_path / "cluster.toml", ["tower", "laptop"])
    words = [word.decode() for word in commands[0]]
    assert words[1:] == [
        "-P", "-m", "homelab", "supervise", builders.RUN, "--nodes", "tower,laptop", "--cluster", str(tmp_path / "cluster.toml"), "--runs-dir", str(tmp_path / "runs"),
    ]  # fmt: skip


def test_a_run_that_has_one_gets_no_second(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, commands = starts(monkeypatch, 1)
    with supervisor_lock.held(paths):
        placement.start(paths, tmp_path / "cluster.toml", ["tower"])
    assert commands == []


@pytest.mark.parametrize(("said", "why"), [(b"warning\nerror: no such node\n", "error: no such node"), (b"", "no answer within 30 s")])
def test_one_that_ends_at_once_is_an_error_with_its_last_word(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, why: str
) -> None:
    starts(monkeypatch, 2, said)
    with pytest.raises(HomelabError) as raised:
        placement.start(paths, tmp_path / "cluster.toml", ["tower"])
    assert raised.value.message == f"the supervisor did not start: {why}"
    assert raised.value.where == str(paths.supervisor_log)
    assert f"homelab supervise {builders.RUN}" in raised.value.hint


def test_one_that_does_not_come_up_is_ended(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said not to run must not begin later."""
    process, _ = starts(monkeypatch, None)
    monkeypatch.setattr(placement, "_START_S", 0.1)
    with pytest.raises(HomelabError, match="did not start"):
        placement.start(paths, tmp_path / "cluster.toml", ["tower"])
    assert process.was_killed


def test_a_machine_that_starts_no_process(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: Any, **__: Any) -> Process:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    view = View()
    SupervisorPlacement("here").leave(FakeFleet(tmp_path), paths, tmp_path / "cluster.toml", ["tower"], view)
    assert isinstance(view.told[0], HomelabError), "a warning: the run is under way all the same"
    assert "Resource temporarily unavailable" in view.told[0].message


def test_a_run_that_is_to_have_none(fleet: FakeFleet, paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, commands = starts(monkeypatch, 0)
    nobody, view = SupervisorPlacement("no"), View()
    nobody.leave(fleet, paths, tmp_path / "cluster.toml", ["tower"], view)
    assert (nobody.is_wanted, commands, view.told) == (False, [], [""])


def test_one_on_the_head_is_prepared_before_the_training_and_started_after_it(
    fleet: FakeFleet, paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, view, placed = OnHead(monkeypatch), View(), SupervisorPlacement("head")
    with placed.prepare(fleet, request(), lambda text: None):
        assert head.acts == ["prepare"]
    placed.leave(fleet, paths, tmp_path / "cluster.toml", ["tower"], view)
    assert head.acts == ["prepare", "start"]
    assert "on tower" in view.told[0] and "~/homelab/log" in view.told[0]


def test_a_start_that_fails_leaves_nothing_on_the_head(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    head = OnHead(monkeypatch)
    with pytest.raises(KeyboardInterrupt), SupervisorPlacement("head").prepare(fleet, request(), lambda text: None):
        raise KeyboardInterrupt
    assert head.acts == ["prepare", "discard"]


def test_a_rehearsal_leaves_nothing_either(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    head = OnHead(monkeypatch)
    SupervisorPlacement("head").rehearse(fleet, request(), lambda text: None)
    assert head.acts == ["prepare", "discard"]


def test_a_head_that_is_this_machine_has_it_here(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, placed = OnHead(monkeypatch), SupervisorPlacement("head")
    _, commands = starts(monkeypatch, 0)
    fleet = FakeFleet(tmp_path, cluster=builders.cluster(nodes={"tower": {"host": "local", "user": None}}))
    store.write_json(paths.supervised_json, {"node": "laptop"})
    with placed.prepare(fleet, request(), lambda text: None):
        pass
    assert placed.start(fleet, paths, tmp_path / "cluster.toml", ["tower"], lambda text: None) == ""
    assert (head.acts, len(commands)) == ([], 1)
    assert not paths.supervised_json.exists(), "it is on no other node any more"
