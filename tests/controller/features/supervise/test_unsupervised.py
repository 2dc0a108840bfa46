"""What is said of a run that nobody looks after, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.base.hint import Command, homelab
from homelab.controller.features.status import unsupervised
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run.state import State

STILL = AttemptVerdict("silent-node", ("laptop",), because="nothing is heard of laptop")


@pytest.mark.parametrize(
    ("state", "known", "place", "still", "words"),
    [
        ("running", {}, "", None, []),
        ("running", {"doing": "watching", "pid": 7}, "", None, ["process 7 here is gone; to start another: SUPERVISE"]),
        ("failed", {"doing": "recovering", "pid": 7}, "", None, ["SUPERVISE"]),
        ("failed", {"doing": "given up", "why": "disk \x1b[31mfull"}, "", None, ["has given up: disk full; by hand: RECOVER"]),
        ("running", {"doing": "watching"}, "tower does not answer", None, ["(tower does not answer): after a failure, recover this run by RECOVER"]),
        ("running", {"doing": "launching", "wanted": True}, "", None, ["ended before it started one; to start one: SUPERVISE"]),
        ("failed", {"doing": "recovering by hand", "wanted": True}, "", None, ["one: SUPERVISE"]),
        ("running", {"doing": "launching", "wanted": False}, "", None, []),
        ("running", {"doing": "recovering by hand"}, "", None, []),
        ("running", {}, "", STILL, ["nothing is heard of laptop, and no supervisor is working: RECOVER"]),
        ("running", {"doing": "watching"}, "", STILL, ["SUPERVISE", "RECOVER"]),
        ("failed", {}, "", STILL, []),
        *[(state, {"doing": "watching"}, "x", STILL, []) for state in ("done", "stopped", "planned", "shipping")],
        ("running", {"doing": ["spoilt"], "why": 5}, "", None, []),
    ],
)  # fmt: skip
def test_what_is_said(state: State, known: dict[str, Any], place: str, still: AttemptVerdict | None, words: list[str]) -> None:
    said = unsupervised.unsupervised_warnings(state, known, place, still, recover=Command("RECOVER"), supervise=Command("SUPERVISE"))
    assert len(said) == len(words) and all(line.commands and line.endswith(part) for line, part in zip(said, words, strict=True)), said


def test_nothing_is_missed_while_the_command_lives_that_is_to_leave_a_supervisor() -> None:
    known = {"doing": "launching", "wanted": True}
    assert (
        unsupervised.unsupervised_warnings(
            "running", known, "", None, recover=Command("RECOVER"), supervise=Command("SUPERVISE"), is_pending=True
        )
        == ()
    )


def test_processes_that_outlive_their_attempt_are_told_with_the_command_that_ends_them() -> None:
    """Somebody has typed the attempt's commands once more: `runs` and `status` call it done, and it is said that something runs."""
    ended = {"name": "r", "attempt": 2, "exit": {"returncode": 0}, "processes": 3}
    part = {name: {"node": name, "time": 1.0, "run": ended | more} for name, more in PARTS.items()}
    (said,) = unsupervised.outliving(parse_replies(part), 2, homelab("stop r"))
    assert (
        "running on node1 (3), although its attempt 2 has ended" in said
        and said.endswith("homelab stop r ends them")
        and said.commands == ("homelab stop r",)
    )
    assert unsupervised.outliving(parse_replies({"node2": part["node2"]}), 2, homelab("stop r")) == ()


PARTS: dict[str, dict[str, object]] = {
    "node1": {},
    "node2": {"processes": 1, "agent_alive": True},  # the agent that has just written the end down
    "node3": {"exit": None, "agent_alive": True, "processes": 4},
}
