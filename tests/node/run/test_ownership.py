"""What a node says of who acts on a run: a machine that has not launched it knows nothing else of its supervisor."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.node.probes import runs
from homelab.node.run import claims, ownership
from homelab.node.system import boot_clock, processes
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.run_requests import FollowRequest, StopRequest
from tests.fakes import ask_node

RUN, NODE = f"2026-ownership-{os.getpid()}", "node1"
WHO = {"by": "me on laptop, process 7", "process": {"pid": 7, "born": 1}}


@pytest.fixture
def request_of(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "runs" / RUN
    (folder / "attempts" / "2" / "nodes" / NODE).mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "attempts" / "2" / "plan.json").write_text(json.dumps({"nodes": [{"name": NODE, "lan_address": "127.0.0.1"}], "ranks": []}))
    return {"workdir": str(tmp_path), "run": RUN, "node": NODE, "attempt": 2, **WHO}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(boot_clock, "clock_s", lambda: now[0])
    return now


def follow(request: dict[str, Any], monkeypatch: pytest.MonkeyPatch, lines: bytes = b"\n\n") -> None:
    """A supervisor that says this, and closes the connection."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    ask_node("follow", request)


def ear_of(request: dict[str, Any], **who: Any) -> ownership.Ear:
    return ownership.Ear(os.path.join(request["workdir"], "runs", RUN), FollowRequest(**{**request, **who}))


def about(request: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    """The same of the machine, or with so much more of it."""
    return {name: request[name] for name in ("workdir", "node", *names)} | more


def owner(request: dict[str, Any]) -> Any:
    return as_json(ask_node("poll", {"workdir": request["workdir"], "node": NODE, "run": RUN}))["owner"]


def test_who_follows_is_known_for_a_while(request_of: dict[str, Any], clock: list[float]) -> None:
    assert owner(request_of) == {"supervisor": None, "claim": None, "stopped_attempt": None}
    ear_of(request_of).hear()
    clock[0] += ownership.SILENT_S - 1
    assert owner(request_of)["supervisor"] == {**WHO, "silent_s": ownership.SILENT_S - 1, "has_left": False, "is_dead": False}
    clock[0] += 2
    assert owner(request_of)["supervisor"] is None, "one that was cut off does not hold the run for ever"


def test_who_has_closed_the_connection_is_soon_forgotten(
    request_of: dict[str, Any], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(request_of, monkeypatch)
    assert owner(request_of)["supervisor"]["has_left"] is True, "it may open another one at once"
    clock[0] += ownership.LEFT_S + 1
    assert owner(request_of)["supervisor"] is None


def test_who_leaves_does_not_take_another_along(request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ear = ear_of(request_of)
    ear.hear()
    ear_of(request_of, by="other", process={"pid": 8}).leave()
    assert owner(request_of)["supervisor"]["has_left"] is False


def test_a_mark_of_another_boot_or_a_damaged_one_is_nobody(request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    follow(request_of, monkeypatch)
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "the next boot")
    assert owner(request_of)["supervisor"] is None
    (Path(request_of["workdir"]) / "runs" / RUN / "supervisor.heard").write_text("[1")
    assert owner(request_of)["supervisor"] is None


def test_a_claim_and_a_stop_by_hand(request_of: dict[str, Any]) -> None:
    ask_node("claim", about(request_of, "run", **WHO, token="t", doing="recovered by its supervisor", age_s=0.0, after=None))
    said = owner(request_of)
    assert (said["claim"]["doing"], said["claim"]["by"], said["stopped_attempt"]) == ("recovered by its supervisor", WHO["by"], None)
    ask_node("stop", about(request_of, "run", by_hand=True, grace_s=0.0))
    assert owner(request_of) | {"supervisor": None} == {"supervisor": None, "claim": None, "stopped_attempt": 2}


def test_a_run_whose_supervisor_waits_elsewhere_is_not_removed(request_of: dict[str, Any]) -> None:
    ear_of(request_of).hear()
    assert "its supervisor watches it (me on laptop, process 7)" in ask_node("run-weigh", about(request_of)).runs[RUN].busy
    with pytest.raises(Refusal, match="its supervisor watches it"):
        ask_node("run-remove", about(request_of, "run"))
    assert ask_node("runs", about(request_of)).runs[0].busy


def test_who_gives_up_does_not_end_what_another_has_started(request_of: dict[str, Any]) -> None:
    with pytest.raises(claims.RefusedError, match="continued elsewhere"):
        ask_node("stop", about(request_of, "run", after=1))
    ask_node("stop", about(request_of, "run", after=2, grace_s=0.0))


def recovered(request: dict[str, Any]) -> list[str]:
    return sorted(runs.read({"workdir": request["workdir"], "node": NODE})["recovered"])


@pytest.mark.parametrize(
    ("end", "expected"),
    [(None, [RUN]), ({"returncode": 1}, [RUN]), ({"returncode": None, "signal": 9, "stopped": True}, [RUN]), ({"returncode": 0}, [])],
)
def test_a_run_between_two_attempts_is_told_and_one_that_is_done_is_not(
    request_of: dict[str, Any], clock: list[float], end: Any, expected: list[str]
) -> None:
    folder = Path(request_of["workdir"]) / "runs" / RUN
    if end is not None:
        (folder / "attempts" / "2" / "nodes" / NODE / "exit.json").write_text(json.dumps(end))
    assert recovered(request_of) == [], "nobody follows it"
    ear = ear_of(request_of)
    ear.hear()
    assert recovered(request_of) == expected
    clock[0] += ownership.SILENT_S + 1
    assert recovered(request_of) == [], "it is not heard any more"
    ear.hear()
    ear.leave()
    assert recovered(request_of) == [], "it has left"


def test_a_run_that_was_stopped_by_hand_is_not_recovered(request_of: dict[str, Any], clock: list[float]) -> None:
    ear_of(request_of).hear()
    assert recovered(request_of) == [RUN]
    with claims.stopping(StopRequest(**about(request_of, "run", by_hand=True))):
        pass
    assert recovered(request_of) == []


def test_a_run_of_which_a_process_is_alive_is_none_between_two_attempts(
    request_of: dict[str, Any], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ear_of(request_of).hear()
    monkeypatch.setattr(processes, "of_runs", lambda *_: {RUN: [7]})
    assert recovered(request_of) == []


def test_a_supervisor_of_this_machine_that_was_killed_is_not_counted(
    request_of: dict[str, Any], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervised by the head, whose own node is asked: it knows at once, and a person must not wait for the silence to grow old."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = {"pid": child.pid, "born": 1, "boot_id": boot_clock.boot_id(), "namespace": processes.namespace()}
    ear_of(request_of, process=here).hear()
    assert owner(request_of)["supervisor"]["is_dead"] is False, "it lives"
    child.kill()
    child.wait()
    assert owner(request_of)["supervisor"]["is_dead"]
    ear_of(request_of, process={**here, "pid": os.getpid()}).hear()
    with monkeypatch.context() as hidden:
        hidden.setattr(processes, "state", lambda pid: "")
        seen = ownership.follower(request_of["workdir"], RUN)
    assert seen is not None and not seen.is_dead, "a /proc that hides other users' processes"
    for elsewhere in ({"boot_id": "another machine"}, {"namespace": "pid:[1]"}, {"pid": None}):
        clock[0] += 10
        ear_of(request_of, process={**here, **elsewhere}).hear()
        assert owner(request_of)["supervisor"]["is_dead"] is False, "of another machine, or in another container, nothing is known"
