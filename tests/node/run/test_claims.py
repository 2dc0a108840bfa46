"""Who may start a run on a node: the claim, a stop by hand that nobody overlooks, and what a start that failed may end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.remote import answers
from homelab.controller.run import claims as controller
from homelab.node import paths
from homelab.node.run import claims, secret_files
from homelab.node.system import boot_clock, processes
from homelab.shared.protocol import files
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.run_messages import Stopped
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(60)
RUN, OTHER, NODE = "2026-01-01-0000-claimed", "2026-01-01-0000-other", "node1"


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    for run in (RUN, OTHER):
        processes.signal_all(processes.of_run(run, str(tmp_path), NODE), signal.SIGKILL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The node's clock; tests move it."""
    now = [1000.0]
    monkeypatch.setattr(boot_clock, "clock_s", lambda: now[0])
    return now


def claim(workdir: str, token: str, run: str = RUN, **more: Any) -> dict[str, Any] | None:
    """Who is in the way, None for nobody."""
    request = {
        "node": NODE,
        "workdir": workdir,
        "run": run,
        "token": token,
        "by": f"desk of {token}",
        "doing": "launched",
        "process": {"pid": 1},
        "age_s": 1.0,
    }
    answer = as_json(ask_node("claim", request | more))
    assert answers.fault("claim", answer) is None
    holder: dict[str, Any] | None = answer["holder"]
    return holder


def stop(workdir: str, run: str = RUN, **more: Any) -> Stopped:
    answer: Stopped = ask_node("stop", {"node": NODE, "workdir": workdir, "run": run, "grace_s": 0.5} | more)
    return answer


def start(workdir: str, token: str | None, run: str = RUN, attempt: int = 1) -> None:
    """Start a program that sleeps, in place of torchrun."""
    ask_node("start", {
        "run": run, "attempt": attempt, "node": NODE, "workdir": workdir, "run_json": {"name": run}, "plan_json": {"ranks": [], "by": token},
        "command": [sys.executable, "-c", "import time; time.sleep(60)"], "environment": {}, "token": token,
    })  # fmt: skip


def alive(workdir: str, run: str = RUN) -> bool:
    return bool(processes.of_run(run, workdir, NODE))


def test_of_two_one_has_the_run_and_the_other_is_told_who(workdir: str) -> None:
    assert claim(workdir, "a") is None and claim(workdir, "a") is None
    holder = claim(workdir, "b")
    assert holder is not None and (holder["run"], holder["by"], holder["doing"], holder["is_started"]) == (
        RUN,
        "desk of a",
        "launched",
        False,
    )
    assert claim(workdir, "c", OTHER) is None, "another run is another matter, where nobody launches"
    ask_node("release", {"workdir": workdir, "run": RUN, "token": "b"})
    assert claim(workdir, "b"), "who is refused releases only what is its own"
    ask_node("release", {"workdir": workdir, "run": RUN, "token": "a"})
    assert claim(workdir, "b") is None


def test_a_launch_wants_its_nodes_alone_for_the_moment(workdir: str, clock: list[float]) -> None:
    assert claim(workdir, "a", alone=True) is None
    holder = claim(workdir, "b", OTHER, alone=True)
    assert holder is not None and holder["run"] == RUN
    start(workdir, "a")
    clock[0] += 3.0
    holder = claim(workdir, "b", OTHER, alone=True, age_s=5.0)
    assert holder is not None and holder["is_started"], "it has looked at the node before the other run was there"
    clock[0] += 3.0
    assert claim(workdir, "b", OTHER, alone=True, age_s=5.0) is None, "this one has seen it in its preflight"
    with pytest.raises(claims.RefusedError, match="is on this node already"):
        claim(workdir, "c", alone=True)


def test_who_never_comes_back_is_waited_for_some_minutes_and_not_longer(
    workdir: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(workdir, "a")
    clock[0] += claims.LIFE_S - 1
    assert claim(workdir, "b")
    clock[0] += 2
    assert claim(workdir, "b") is None
    with pytest.raises(claims.RefusedError, match="is being launched by desk of b") as caught:
        start(workdir, "a")
    assert caught.value.kind == "taken" and f"homelab stop {RUN}" in caught.value.hint and not alive(workdir)
    assert claim(workdir, "c", instead="b") is None, "whose process is known to be gone"
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "the next boot")
    assert claim(workdir, "d") is None, "nor is what was written before a power cut"


def test_a_claim_that_nobody_else_wants_lasts(workdir: str, clock: list[float]) -> None:
    claim(workdir, "a")
    clock[0] += 4 * 3600  # a checkpoint of many GB was brought
    start(workdir, "a")
    assert alive(workdir)


@pytest.mark.parametrize("has_begun", [True, False])
def test_of_two_launches_one_starts_also_where_the_first_ships_for_long(workdir: str, clock: list[float], has_begun: bool) -> None:
    """The second has found no process of the first in its preflight."""
    claim(workdir, "a", alone=True)
    clock[0] += claims.LIFE_S + 1
    assert claim(workdir, "b", OTHER, alone=True, age_s=60.0) is None
    clock[0] += 2
    if has_begun:
        start(workdir, "b", OTHER)
    with pytest.raises(claims.RefusedError, match=f"another launch has taken this node meanwhile: {OTHER}, by desk of b") as caught:
        start(workdir, "a")
    assert caught.value.kind == "taken" and not alive(workdir)
    if not has_begun:
        start(workdir, "b", OTHER)
    assert alive(workdir, OTHER)


def test_a_stop_by_hand_ends_what_is_under_way(workdir: str, clock: list[float]) -> None:
    """While a launch ships, and while a recovery looks: there is nothing to be ended yet, and it must not begin later."""
    claim(workdir, "a")
    assert stop(workdir, by_hand=True).asked == 0
    with pytest.raises(claims.RefusedError) as caught:
        start(workdir, "a")
    assert caught.value.kind == "stopped" and f"homelab recover {RUN}" in caught.value.hint
    assert not alive(workdir) and not os.path.exists(os.path.join(paths.run_dir(workdir, RUN), "run.json"))
    clock[0] += 2.0
    with pytest.raises(claims.RefusedError, match="stopped by hand 2 s ago") as caught:
        claim(workdir, "b", age_s=3.0)  # began before the stop, and comes to its claim behind it
    assert caught.value.kind == "stopped"
    assert claim(workdir, "c", age_s=1.5) is None, "whoever begins behind the stop means it"
    start(workdir, "c")
    assert alive(workdir)


def test_a_stop_that_is_part_of_a_recovery_stops_nobody_elses_run(workdir: str) -> None:
    claim(workdir, "a")
    start(workdir, "a")
    claim(workdir, "b")
    with pytest.raises(claims.RefusedError, match="is being launched by desk of b") as caught:
        stop(workdir, token="a", after=1)
    assert caught.value.kind == "taken" and alive(workdir)
    assert stop(workdir, token="b", after=1).asked >= 2
    start(workdir, "b", attempt=2)
    with pytest.raises(claims.RefusedError, match="knows attempt 2") as caught:
        stop(workdir, token="a", after=1)
    assert caught.value.kind == "superseded" and alive(workdir)
    with pytest.raises(claims.RefusedError, match="knows attempt 2"):
        claim(workdir, "c", after=1)
    assert alive(workdir)


def test_a_start_that_is_undone_ends_only_its_own(workdir: str) -> None:
    claim(workdir, "a")
    start(workdir, "a")
    for late in ("b", None):
        with pytest.raises(claims.RefusedError) as caught:
            start(workdir, late)
        assert caught.value.kind == "taken"
    undo = {"node": NODE, "workdir": workdir, "run": RUN, "grace_s": 0.5}
    assert ask_node("undo", undo | {"token": "b"}).asked == 0 and alive(workdir)
    assert files.read_object(os.path.join(paths.run_dir(workdir, RUN), "attempts", "1", "plan.json")) == {"ranks": [], "by": "a"}
    assert ask_node("undo", undo | {"token": "a"}).asked >= 2 and not alive(workdir)


def test_a_start_that_comes_behind_its_own_undoing_does_not_begin(workdir: str) -> None:
    claim(workdir, "a")
    assert ask_node("undo", {"node": NODE, "workdir": workdir, "run": RUN, "token": "a"}).asked == 0
    with pytest.raises(claims.RefusedError):
        start(workdir, "a")
    assert not alive(workdir)


def test_a_full_disk_does_not_hide_a_stop(workdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(workdir, "a")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(files, "write_json", full)
        assert stop(workdir, by_hand=True).left == ()
    with pytest.raises(claims.RefusedError):
        start(workdir, "a")


def test_an_older_controller_that_knows_no_claims_starts_and_stops_as_before(workdir: str) -> None:
    start(workdir, None)
    assert alive(workdir) and stop(workdir).asked >= 2 and not alive(workdir)
    claim(workdir, "a")
    with pytest.raises(claims.RefusedError, match="is being launched by"):
        start(workdir, None, attempt=2)


HOLDER = "import sys, time\nfrom homelab.node.run import claims\nwith claims.locked(sys.argv[1]):\n    print('has it', flush=True)\n    time.sleep(60)\n"


def test_a_frozen_holder_of_the_lock_is_named_and_a_stop_by_hand_ends_what_runs(workdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(workdir, "a")
    start(workdir, "a")
    monkeypatch.setattr(claims, "LOCK_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", HOLDER, workdir], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
            with pytest.raises(claims.RefusedError, match=f"process {holder.pid} has held the lock"):
                claim(workdir, "b")
            holder.send_signal(signal.SIGSTOP)
            os.waitpid(holder.pid, os.WUNTRACED)
            with pytest.raises(claims.RefusedError, match=f"process {holder.pid} is frozen .* holds the lock") as caught:
                claim(workdir, "b")
            assert (caught.value.kind, caught.value.where) == ("frozen", os.path.join(workdir, "claims", ".lock"))
            assert f"kill -CONT {holder.pid}" in caught.value.hint and f"kill -KILL {holder.pid}" in caught.value.hint
            undo = {"node": NODE, "workdir": workdir, "run": RUN, "token": "z", "grace_s": 0.5}
            assert ask_node("undo", undo).asked == 0, "an undo needs no lock"
            with pytest.raises(claims.RefusedError, match="is frozen"):
                stop(workdir, token="a", after=1)
            assert alive(workdir), "a recovery cannot know whether the run is still its own"
            with pytest.raises(claims.RefusedError, match="is frozen"):
                stop(workdir, by_hand=True)
            assert not alive(workdir)
            files.write_json(claims._mark(claims._folder(workdir), RUN), boot_clock.now())
            assert claims.was_stopped(RunRequest(workdir=workdir, run=RUN), boot_clock.clock_s() - 5), "a mark that is there counts"
            os.unlink(claims._mark(claims._folder(workdir), RUN))
        finally:
            holder.kill()
    assert claim(workdir, "b", instead="a") is None


@pytest.mark.parametrize("verb", ["undo", "stop"])
def test_a_start_that_has_the_lock_does_not_begin_behind_its_undoing(workdir: str, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """It was frozen, or its disk is slow, and its controller has told a person that nothing was begun."""
    claim(workdir, "a")
    monkeypatch.setattr(claims, "LOCK_S", 0.2)
    keep = secret_files.put

    def slow(folder: str, secrets: Any) -> None:
        keep(folder, secrets)
        if verb == "undo":
            assert ask_node("undo", {"node": NODE, "workdir": workdir, "run": RUN, "token": "a", "grace_s": 0.5}).asked == 0
        else:
            with pytest.raises(claims.RefusedError, match="the lock of the claims"):
                stop(workdir, by_hand=True)

    monkeypatch.setattr(secret_files, "put", slow)
    with pytest.raises(claims.RefusedError, match="was undone or stopped meanwhile") as caught:
        start(workdir, "a")
    assert caught.value.kind == "stopped" and not alive(workdir) and paths.newest_attempt(paths.run_dir(workdir, RUN)) == 0


def test_the_limit_is_shorter_than_the_controllers() -> None:
    assert claims.LOCK_S < controller._TIMEOUT_S


def test_damaged_claims_are_nobodys(workdir: str) -> None:
    folder = Path(workdir, "claims")
    folder.mkdir()
    for text in ("", "[]", "{", '{"token": 5, "at_s": "x"}', '{"run": "another", "token": "x", "at_s": 1}'):
        (folder / f"{RUN}.json").write_text(text)
        (folder / f"{RUN}.stopped").write_text(text)
        assert claim(workdir, "a", alone=True) is None
        ask_node("release", {"workdir": workdir, "run": RUN, "token": "a"})
