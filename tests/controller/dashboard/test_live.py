"""Watching: it ends with the run, and Ctrl-C ends only the watching."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from homelab.controller.base.errors import UnreachableError
from homelab.controller.dashboard import interactive, live
from homelab.controller.dashboard.live import Watched, watch
from homelab.controller.dashboard.snapshot import Snapshot
from tests.controller.dashboard import sample

pytestmark = pytest.mark.timeout(30)

RUNNING = sample.snapshot()
DONE = RUNNING.model_copy(update={"state": "done", "step": 1000, "eta_s": None, "is_over": True})


@pytest.fixture(autouse=True)
def a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests themselves run in: on a dumb one rich draws no screen."""
    monkeypatch.setenv("TERM", "xterm-256color")


class Script:
    """`collect` and `sleep` that play a list: snapshots are returned, exceptions raised."""

    def __init__(self, *scenes: Snapshot | BaseException) -> None:
        self.scenes: Iterator[Snapshot | BaseException] = iter(scenes)
        self.slept: list[float] = []

    def collect(self) -> Snapshot:
        scene = next(self.scenes)
        if isinstance(scene, BaseException):
            raise scene
        return scene

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=100, height=30, color_system=None, legacy_windows=False)


def output(of: Console) -> str:
    assert isinstance(of.file, StringIO)
    return of.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_it_ends_with_the_run(terminal: bool, state: str) -> None:
    script, screen = Script(RUNNING, RUNNING, DONE.model_copy(update={"state": state})), console(terminal=terminal)
    watched = watch(script.collect, screen, refresh_s=3.0, sleep=script.sleep)
    assert watched.last is not None and (watched.last.state, watched.end) == (state, "over")
    assert script.slept == [3.0, 3.0]
    assert state in output(screen)


def test_the_last_picture_stays_after_the_screen_was_given_back() -> None:
    script, screen = Script(RUNNING, DONE), console(terminal=True)
    watch(script.collect, screen, sleep=script.sleep)
    left_standing = output(screen).rsplit("\x1b[?1049l", 1)[1]
    assert "✓ done" in left_standing and "step 1000/1000" in left_standing


def test_without_a_terminal_a_line_is_printed_only_when_something_changed() -> None:
    script, screen = Script(RUNNING, RUNNING, RUNNING, DONE), console(terminal=False)
    watch(script.collect, screen, sleep=script.sleep)
    assert [line.split("  ")[0] for line in output(screen).splitlines()] == ["running", "done"]


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_leaves_the_run_alone_and_says_so(terminal: bool) -> None:
    script, screen = Script(RUNNING, KeyboardInterrupt()), console(terminal=terminal)
    again = f"homelab status --wait {sample.RUN}"
    assert watch(script.collect, screen, sleep=script.sleep, again=again) == Watched(RUNNING, "interrupted")
    said = output(screen).splitlines()[-3:]
    assert said == [
        "The run continues without the dashboard.", f"  to look again: {again}", f"  to end it:     homelab stop {sample.RUN}",
    ]  # fmt: skip


def test_ctrl_c_while_waiting() -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    screen = console(terminal=True)
    assert watch(Script(RUNNING).collect, screen, sleep=sleep) == Watched(RUNNING, "interrupted")
    assert "continues" in output(screen)


def test_ctrl_c_before_the_first_answer() -> None:
    screen = console(terminal=True)
    assert watch(Script(KeyboardInterrupt()).collect, screen) == Watched(None, "interrupted")
    assert "The run continues" in output(screen)


def test_an_error_of_the_collector_goes_through_and_gives_the_screen_back() -> None:
    script, screen = Script(RUNNING, UnreachableError("no node answers")), console(terminal=True)
    with pytest.raises(UnreachableError):
        watch(script.collect, screen, sleep=script.sleep)
    assert output(screen).rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in output(screen)


@pytest.mark.parametrize("state", ["failed", "stopped", "lost"])
def test_a_state_alone_is_not_the_end(state: str) -> None:
    """A supervisor may be about to start the next attempt."""
    between = DONE.model_copy(update={"state": state, "is_over": False})
    script, screen = Script(between, RUNNING, between, DONE), console(terminal=False)
    assert watch(script.collect, screen, sleep=script.sleep) == Watched(DONE, "over")


def test_on_a_dumb_terminal_lines_are_printed_as_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    script, screen = Script(RUNNING, RUNNING, DONE), console(terminal=True)
    watch(script.collect, screen, sleep=script.sleep)
    assert [line.split("  ")[0] for line in output(screen).splitlines()] == ["running", "done"]


def test_the_key_q_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = console(terminal=True)
    monkeypatch.setattr(live, "_keys_of", lambda console: 0)
    monkeypatch.setattr(interactive, "watch", lambda watched, *_, **__: watched.keep(RUNNING))
    assert watch(Script().collect, screen) == Watched(RUNNING, "left")
    assert "The run continues without the dashboard" in output(screen)
