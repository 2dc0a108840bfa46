"""The state of a run from what the nodes say: every state, and the cases where it would be easy to say the wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run.state import FINISHED, State, run_state
from tests.controller.dashboard import sample

NODES = ("tower", "laptop", "old")
OK = {"returncode": 0, "signal": None, "ended_at": sample.NOW - 5, "stopped": False}
BAD = {"returncode": 1, "signal": None, "ended_at": sample.NOW - 5, "stopped": False}
STOPPED = {"returncode": None, "signal": 15, "ended_at": sample.NOW - 5, "stopped": True}
DEAD = {"agent_alive": False, "torchrun_alive": False}
NOT_YET: dict[str, Any] = {**DEAD, "started_at": None, "attempt": 0, "ranks": {}}


def ended(how: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**DEAD, "exit": {**how, **more}}


def beating(age_s: float, phase: str = "training", step: int = 5) -> dict[str, Any]:
    beat = {"time": sample.NOW - age_s, "phase": phase, "step": step}
    return {"0": {"heartbeat": beat, "metrics": []}}


def state_of(unreachable: dict[str, str] | None = None, intent: Any = None, **runs: Any) -> State:
    raw = {node: sample.raw_reply(node, rank, 3, **runs.get(node, {})) for rank, node in enumerate(NODES)}
    for node in unreachable or {}:
        del raw[node]
    return run_state(NODES, parse_replies(raw), unreachable or {}, intent=intent)


def all_nodes(run: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(NODES, run)


def unknown_everywhere(intent: State | None = None) -> State:
    raw = {node: {**sample.raw_reply(node, rank, 3), "run": None} for rank, node in enumerate(NODES)}
    return run_state(NODES, parse_replies(raw), {}, intent=intent)


def test_nobody_knows_it() -> None:
    assert unknown_everywhere() == "planned"
    assert unknown_everywhere("shipping") == "shipping"


def test_the_folder_is_there_but_nothing_was_started() -> None:
    assert state_of(**all_nodes(NOT_YET)) == "shipping"


def test_alive_without_a_step_is_starting() -> None:
    assert state_of(**all_nodes({"ranks": {}})) == "starting"
    assert state_of(**all_nodes({"ranks": beating(1, "loading", 0)})) == "starting"


def test_some_started_and_others_not_yet_is_starting() -> None:
    assert state_of(tower={"ranks": {}}, laptop=NOT_YET, old=NOT_YET) == "starting"


@pytest.mark.parametrize("phase", ["training", "saving", "evaluating"])
def test_one_rank_in_its_steps_is_running(phase: str) -> None:
    state = state_of(tower={"ranks": beating(1, phase, 0)}, laptop={"ranks": {}}, old={"ranks": {}})
    assert state == "running"


def test_a_script_runs_once_it_has_printed() -> None:
    """It gives no signs of its steps; a worker of ours that prints while it loads does not run yet."""
    said = {"0": {"heartbeat": None, "metrics": [], "log_tail": {"stdout": ["epoch 1"], "stderr": []}}}
    raw = {node: sample.raw_reply(node, rank, 3, ranks=said if node == "laptop" else {}) for rank, node in enumerate(NODES)}
    assert run_state(NODES, parse_replies(raw), {}, is_script=True) == "running"
    assert run_state(NODES, parse_replies(raw), {}) == "starting"
    silent = {node: sample.raw_reply(node, rank, 3, ranks={}) for rank, node in enumerate(NODES)}
    assert run_state(NODES, parse_replies(silent), {}, is_script=True) == "starting"


def test_a_heartbeat_from_the_future_is_no_sign_of_life_today() -> None:
    """The node's clock was an hour ahead and was put right: whoever gave that sign may be gone since."""
    gone = {"laptop": "no route to host"}
    assert state_of(gone, tower={"ranks": beating(-5)}, old={"ranks": beating(-3600)}) == "running", "a clock is slewed all the time"
    assert state_of(gone, **all_nodes({"ranks": beating(-3600)})) == "lost"
    assert state_of(gone, tower={"ranks": beating(-3600)}, old={"ranks": beating(5)}) == "running"


def test_done_needs_every_node() -> None:
    assert state_of(**all_nodes(ended(OK))) == "done"
    assert state_of(tower=ended(OK), laptop=ended(OK)) == "running"  # old still runs


def test_done_although_a_node_cannot_be_asked_when_the_result_is_there() -> None:
    gone = {"old": "no route to host"}
    assert state_of(gone, tower=ended(OK) | {"final": True}, laptop=ended(OK)) == "done"
    assert state_of(gone, tower=ended(OK), laptop=ended(OK)) == "lost"


def test_one_failure_is_a_failure_even_while_others_still_run() -> None:
    assert state_of(laptop=ended(BAD)) == "failed"


def test_a_signal_is_a_failure() -> None:
    assert state_of(laptop=ended({**BAD, "returncode": None, "signal": 9})) == "failed"


def test_a_node_that_was_rebooted_has_failed() -> None:
    assert state_of(laptop=DEAD) == "failed"


def test_failed_wins_over_unreachable() -> None:
    assert state_of({"old": "no route to host"}, laptop=ended(BAD)) == "failed"


def test_stopping_and_stopped() -> None:
    assert state_of(laptop=ended(STOPPED)) == "stopping"
    assert state_of(**all_nodes(ended(STOPPED))) == "stopped"
    assert state_of(intent="stopping") == "stopping"  # the controller knows before any node does


def test_a_failure_that_is_only_the_echo_of_a_stop() -> None:
    echo = {"laptop": ended(BAD, ended_at=sample.NOW - 4), "old": ended(BAD, ended_at=sample.NOW - 4)}
    assert state_of(tower=ended(STOPPED), **echo) == "stopped"
    late = {"tower": ended(STOPPED, ended_at=sample.NOW - 1), **echo}
    assert state_of(**late) == "failed"  # the others failed first, and tower was stopped because of it
    assert state_of(**late, intent="stopped") == "stopped"  # unless the controller knows better


def test_unreachable_nodes_and_fresh_heartbeats() -> None:
    gone = {"old": "no route to host"}
    assert state_of(gone) == "running"
    assert state_of(gone, **{node: {"ranks": beating(1, "loading", 0)} for node in NODES}) == "starting"


def test_unreachable_nodes_and_stale_heartbeats_are_lost() -> None:
    gone = {"old": "no route to host"}
    assert state_of(gone, **{node: {"ranks": beating(1000)} for node in NODES}) == "lost"


def test_saving_may_be_silent_for_longer_than_a_step() -> None:
    gone = {"old": "no route to host"}
    assert state_of(gone, **{node: {"ranks": beating(500)} for node in NODES}) == "lost"
    assert state_of(gone, **{node: {"ranks": beating(500, "saving")} for node in NODES}) == "running"


def test_nobody_answers() -> None:
    assert state_of(dict.fromkeys(NODES, "no route to host")) == "lost"


def test_what_has_ended_stays_so_when_its_nodes_are_off() -> None:
    off = dict.fromkeys(NODES, "no route to host")
    for kept in FINISHED:
        assert run_state(NODES, {}, off, kept=kept) == kept
    assert run_state(NODES, {}, off, kept="running") == "lost"
    ended_well = parse_replies({node: sample.raw_reply(node, 1, 3, **ended(OK)) for node in NODES[1:]})
    assert run_state(NODES, ended_well, {"tower": "off"}) == "lost", "nobody who answers has the result"
    assert run_state(NODES, ended_well, {"tower": "off"}, kept="done") == "done"
    alive = parse_replies({node: sample.raw_reply(node, 1, 3, ranks=beating(1000)) for node in NODES[1:]})
    assert run_state(NODES, alive, {"tower": "off"}, kept="stopped") == "lost", "its ranks live"


def test_a_new_attempt_is_not_judged_by_the_old_one() -> None:
    newer = {"attempt": 2}
    assert state_of(tower=newer, laptop=newer, old=ended(BAD)) == "running"
    assert state_of(tower=newer | {"ranks": {}}, laptop=ended(BAD), old=ended(BAD)) == "starting"


def test_finished_states_are_those_in_which_nothing_more_happens() -> None:
    assert {"done", "failed", "stopped"} == FINISHED


def test_between_the_last_signal_of_a_stop_and_its_record_it_has_not_failed() -> None:
    """Nothing of it is alive and no end is written down, as after a power cut; but homelab was about to end it there."""
    gone = {**DEAD, "exit": None}
    assert state_of(tower=ended(OK), laptop=gone) == "failed"
    marked = {**gone, "stop_marked_at": sample.NOW - 6}
    assert state_of(**all_nodes(marked)) == "stopped"
    assert state_of(tower={}, laptop=marked, old=marked) == "stopping"
    assert state_of(tower=ended(BAD), laptop=marked, old=ended(STOPPED)) == "stopped", "the failure came after it, as its echo"
    late = {**gone, "stop_marked_at": sample.NOW - 2}
    assert state_of(tower=ended(BAD), laptop=late, old=late) == "failed", "the stop is the supervisor's, after the failure"
    assert state_of(**all_nodes({**gone, "stop_marked_at": "damaged"})) == "failed"
