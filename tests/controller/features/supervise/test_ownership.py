"""Who may end an attempt, and when a run is over: between two attempts the nodes say the same as after the end."""

from __future__ import annotations

import ast
from typing import get_args

import pytest

from homelab.controller.run.ownership import STILL_S, UNSEEN_S, Actor, Ownership, is_orphaned, is_over, may_end, told_state
from homelab.controller.run.state import FINISHED, State
from tests.limits import label, trees

FOREVER = float("inf")
STATES: tuple[State, ...] = get_args(State)
NOBODY = Ownership()
RECOVERING = Ownership("recovering: rank 1 on node2 was stopped by a signal")
LEAVING = Ownership("watching", is_stopped_by_hand=True)
STOPPED = Ownership(is_stopped_by_hand=True)
GIVEN_UP = Ownership(has_said_its_end=True)
ALONE = Ownership(is_supervised=False, has_said_its_end=True)


@pytest.mark.parametrize("state", [state for state in STATES if state != "done"])
def test_a_run_that_somebody_owns_goes_on_whatever_its_nodes_say(state: State) -> None:
    assert not is_over(state, RECOVERING, FOREVER)
    assert not is_orphaned(state, RECOVERING)


@pytest.mark.parametrize("owner", [NOBODY, RECOVERING, LEAVING, STOPPED, GIVEN_UP, ALONE])
def test_a_run_that_is_done_is_over_at_once(owner: Ownership) -> None:
    assert is_over("done", owner, 0.0)


def test_a_stop_by_hand_is_the_end_before_its_supervisor_has_left() -> None:
    """It may be frozen, and never leave."""
    assert is_over("stopped", LEAVING, 0.0) and not is_over("stopping", LEAVING, FOREVER)


@pytest.mark.parametrize(("state", "owner", "still_s"), [
    ("failed", GIVEN_UP, 0.0), ("stopped", GIVEN_UP, 0.0), ("failed", ALONE, 0.0), ("stopped", STOPPED, 0.0),
    ("failed", NOBODY, STILL_S), ("stopped", NOBODY, STILL_S), ("lost", NOBODY, UNSEEN_S), ("lost", GIVEN_UP, UNSEEN_S),
])  # fmt: skip
def test_what_stands_still_without_an_owner_is_over(state: State, owner: Ownership, still_s: float) -> None:
    assert is_over(state, owner, still_s) and not (still_s and is_over(state, owner, still_s - 0.1))


@pytest.mark.parametrize("state", [state for state in STATES if state not in (*FINISHED, "lost")])
def test_what_lives_is_not_over(state: State) -> None:
    assert not any(is_over(state, owner, FOREVER) for owner in (NOBODY, STOPPED, GIVEN_UP, ALONE))


def test_what_its_owner_has_stopped_starts_again() -> None:
    assert [told_state(state, RECOVERING) for state in ("stopping", "stopped", "failed", "lost", "running")] == [
        "starting",
        "starting",
        "failed",
        "lost",
        "running",
    ]
    assert told_state("stopped", LEAVING) == told_state("stopped", STOPPED, kept="failed") == told_state("stopped", NOBODY) == "stopped"
    assert told_state("stopped", GIVEN_UP, kept="failed") == "failed", "its supervisor has stopped what was left, and given up"


def test_who_looks_may_end_nothing() -> None:
    everything = [(state, owner) for state in STATES for owner in (NOBODY, RECOVERING, LEAVING, STOPPED, GIVEN_UP, ALONE)]
    may: dict[Actor, list[tuple[State, Ownership]]] = {
        actor: [pair for pair in everything if may_end(actor, *pair)] for actor in get_args(Actor)
    }
    assert may == {"person": everything, "owner": everything, "starter": [("failed", ALONE)], "looker": []}


# Who ends ranks on the nodes: a stop by hand, who holds the run, and a start that takes back what it has begun.
ENDS = {
    "controller/attempt/start.py", "controller/features/recover/halt.py", "controller/features/stop/stop.py",
    "controller/features/supervise/supervisor.py", "controller/features/bench/cell_run.py", "controller/features/bench/suite_run.py", "cli/stop.py",
    "controller/features/queue/job_work.py",  # at the end of a job's hours, by its own --stop-at
    "controller/features/verify/window_run.py",  # of the window that it has started itself
}  # fmt: skip


def test_nothing_else_in_the_house_ends_ranks() -> None:
    found = set()
    for path, tree in trees().items():
        if label(path).startswith(("node/", "worker/")):
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            verb = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if name in ("stop.stop", "start.stop_all", "stop_all") or (name.endswith(".ask") and verb in ("stop", "mark-stop", "undo")):
                found.add(label(path))
    assert found == ENDS
