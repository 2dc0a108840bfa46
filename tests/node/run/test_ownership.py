"""What a node says of who acts on a run: a machine that has not launched it knows nothing else of its supervisor."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.node.probes import runs
from homelab.node.run import claims, ownership, poll, run_folders, status_stream, torchrun
from homelab.node.system import boot_clock, processes
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import as_json

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
    status_stream.follow(request)


def owner(request: dict[str, Any]) -> Any:
    return as_json(poll.poll({"workdir": request["workdir"], "node": NODE, "run": RUN}))["owner"]


def test_who_follows_is_known_for_a_while(request_of: dict[str, Any], clock: list[float]) -> None:
    assert owner(request_of) == {"supervisor": None, "claim": None, "stopped_attempt": None}
    ownership.Ear(os.path.join(request_of["workdir"], "runs", RUN), request_of).hear()
    clock[0] += ownership.SILENT_S - 1
    assert owner(request_of)["supervisor"] == {**WHO, "silent_s": ownership.SILENT_S - 1, "has_left": False}
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
    ear = ownership.Ear(os.path.join(request_of["workdir"], "runs", RUN), request_of)
    ear.hear()
    ownership.Ear(os.path.join(request_of["workdir"], "runs", RUN), {"by": "other", "process": {"pid": 8}}).leave()
    assert owner(request_of)["supervisor"]["has_left"] is False


def test_a_mark_of_another_boot_or_a_damaged_one_is_nobody(request_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    follow(request_of, monkeypatch)
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "the next boot")
    assert owner(request_of)["supervisor"] is None
    (Path(request_of["workdir"]) / "runs" / RUN / "supervisor.heard").write_text("[1")
    assert owner(request_of)["supervisor"] is None


def test_a_claim_and_a_stop_by_hand(request_of: dict[str, Any]) -> None:
    claims.claim({**request_of, "token": "t", "doing": "recovered by its supervisor", "age_s": 0.0, "after": None})
    said = owner(request_of)
    assert (said["claim"]["doing"], said["claim"]["by"], said["stopped_attempt"]) == ("recovered by its supervisor", WHO["by"], None)
    torchrun.stop({**request_of, "by_hand": True, "grace_s": 0.0})
    assert owner(request_of) | {"supervisor": None} == {"supervisor": None, "claim": None, "stopped_attempt": 2}


def test_a_run_whose_supervisor_waits_elsewhere_is_not_removed(request_of: dict[str, Any]) -> None:
    ownership.Ear(os.path.join(request_of["workdir"], "runs", RUN), request_of).hear()
    assert "its supervisor looks after it (me on laptop, process 7)" in run_folders.weigh(request_of).runs[RUN].busy
    with pytest.raises(Refusal, match="its supervisor looks after it"):
        run_folders.remove(request_of)
    assert poll.runs(request_of).runs[0].busy


def test_who_gives_up_does_not_end_what_another_has_started(request_of: dict[str, Any]) -> None:
    with pytest.raises(claims.RefusedError, match="gone on elsewhere"):
        torchrun.stop({key: request_of[key] for key in ("workdir", "run", "node")} | {"after": 1})
    torchrun.stop({key: request_of[key] for key in ("workdir", "run", "node")} | {"after": 2, "grace_s": 0.0})


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
    ear = ownership.Ear(str(folder), request_of)
    ear.hear()
    assert recovered(request_of) == expected
    clock[0] += ownership.SILENT_S + 1
    assert recovered(request_of) == [], "it is not heard any more"
    ear.hear()
    ear.leave()
    assert recovered(request_of) == [], "it has left"


def test_a_run_that_was_stopped_by_hand_is_not_recovered(request_of: dict[str, Any], clock: list[float]) -> None:
    ownership.Ear(str(Path(request_of["workdir"]) / "runs" / RUN), request_of).hear()
    assert recovered(request_of) == [RUN]
    with claims.stopping({**request_of, "by_hand": True}):
        pass
    assert recovered(request_of) == []


def test_a_run_of_which_a_process_is_alive_is_none_between_two_attempts(
    request_of: dict[str, Any], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ownership.Ear(str(Path(request_of["workdir"]) / "runs" / RUN), request_of).hear()
    monkeypatch.setattr(processes, "of_runs", lambda *_: {RUN: [7]})
    assert recovered(request_of) == []
