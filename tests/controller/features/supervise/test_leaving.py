"""A node goes to its owner and comes back: what the supervisor does, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.features.supervise.acts import Begin, Collect, End, Examine, Halt, Incident, Resume, Save, Wait, WaitBeforeRetry
from homelab.controller.features.supervise.leaving import LOOK_S, SAVE_S, Saving
from homelab.controller.features.supervise.observation import Examined, HaltResult, Observation, ResumeResult
from homelab.controller.features.supervise.step import OTHERS_S, RETRY_S, WAIT_S, Recovering, State, next_step
from homelab.controller.run.leave import HOURS, Away
from tests.controller.features.supervise.test_step import (
    ABSENT,
    BLIND,
    DEAD,
    DONE,
    EXAMINED,
    KILLED,
    NOW,
    SILENT,
    TIME,
    WELL,
    after,
    recovering,
    seen,
    state,
    watching,
)  # fmt: skip

pytestmark = pytest.mark.timeout(30)
AWAY = {"laptop": Away("23:00")}
SAID = "laptop was given back to its owner until 23:00"
LEAVE = Incident(None, TIME, ABSENT, leaving={"laptop": SAID})
LENT = frozenset({"oldtower"})
RETURN = Incident(None, TIME, frozenset(), ("oldtower",), returning=("oldtower",))
ASKED = watching(saving=Saving(NOW - 1.0, 41))
LATE = watching(saving=Saving(NOW - SAVE_S - 1.0, 41))
ALL = ("tower", "laptop", "oldtower")


def trains(**more: Any) -> Observation:
    """Step 41 is done, the newest checkpoint is that of step 40."""
    return seen(WELL, **{"step": 41, "checkpoint": 40, "save": "asked", **more})


def test_a_leave_saves_first_and_is_no_restart() -> None:
    now, act = next_step(state(), trains(away=AWAY))
    assert act == Save() and now.watch.saving == Saving(NOW, 41)
    assert next_step(now, trains(away=AWAY))[1] == Wait(), "it is asked for once"
    now, act = next_step(now, trains(away=AWAY, checkpoint=42, step=42))
    assert act == Begin(LEAVE) and act.incident.kind == "leave" and act.incident.because == SAID
    now, act = next_step(now, after(away=AWAY))
    assert act == Examine(LEAVE)
    now, act = next_step(now, after(Examined(None, 42), away=AWAY))
    assert isinstance(act, Halt)
    now, act = next_step(now, after(HaltResult(42, ("tower", "laptop")), away=AWAY))
    assert act == Resume(SAID, ("laptop",), {})
    now, _ = next_step(now, after(ResumeResult(3, 42, ("tower",)), away=AWAY))
    assert now.phase == "resumed" and now.attempt == 3 and now.restarts == ()


@pytest.mark.parametrize(
    ("what", "before", "now", "act"),
    [
        ("the checkpoint is that of an earlier step", ASKED, trains(away=AWAY, checkpoint=40, step=43), Wait()),
        ("the save takes too long: what was saved before has to do", LATE, trains(away=AWAY), Begin(LEAVE)),
        ("it loads: nothing was done that could be saved", state(), trains(away=AWAY, save="none"), Begin(LEAVE)),
        ("a supervisor that has just begun does not know yet", state(), trains(away=AWAY, save="unknown"), Wait()),
        ("a node that is not heard could not be stopped", watching(reported=BLIND.because), replace(trains(away=AWAY), verdict=BLIND), Wait()),
        ("the training ends while it is asked to save", ASKED, replace(trains(away=AWAY), verdict=DONE), End("done", "done", ABSENT, collects=True)),
        ("a rank dies meanwhile: that is a fault", ASKED, replace(trains(away=AWAY), verdict=DEAD), Begin(Incident(DEAD, TIME, ABSENT))),
        ("a node that does not take part is free already", state(), trains(away={"oldtower": Away()}), Wait()),
        ("and is not taken back while it is away", watching(first_seen={"oldtower": 40}), trains(away={"oldtower": Away()}, well=ABSENT, checkpoint=50), Wait()),
        ("it came back: a save is asked for, not waited for", state(), trains(lent=LENT, well=ABSENT), Save()),
        ("then it takes part again", ASKED, trains(lent=LENT, well=ABSENT, checkpoint=41), Begin(RETURN)),
        ("it came back and is ill: it is waited for", state(), trains(lent=LENT), Wait()),
        ("it came back in vain: not for a while", state(refused={"oldtower": NOW + 1}), trains(lent=LENT, well=ABSENT), Wait()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_comes_first(what: str, before: State, now: Observation, act: Any) -> None:
    assert next_step(before, now)[1] == act


@pytest.mark.parametrize(
    ("away", "said"),
    [
        (Away("", "steam runs there"), "laptop was given back to its owner: steam runs there"),
        (Away("23:00", HOURS), "laptop was given back to its owner until 23:00: it is outside its hours"),
    ],
)
def test_a_node_that_goes_by_itself_goes_like_any_other(away: Away, said: str) -> None:
    gone = {"laptop": away}
    now, act = next_step(state(), trains(away=gone))
    assert act == Save()
    now, act = next_step(now, trains(away=gone, checkpoint=42, step=42))
    assert isinstance(act, Begin) and act.incident.kind == "leave" and act.incident.because == said
    now, _ = next_step(now, after(away=gone))
    now, _ = next_step(now, after(Examined(None, 42), away=gone))
    _, waits_alone = next_step(now, after(HaltResult(42, ("laptop",)), away=gone))
    assert isinstance(waits_alone, WaitBeforeRetry) and waits_alone.error is not None and waits_alone.is_for_owner
    assert waits_alone.error.message == f"{said}, and no other node is left"
    now, act = next_step(now, after(HaltResult(42, ("tower", "laptop")), away=gone))
    assert act == Resume(said, ("laptop",), {})
    now, _ = next_step(now, after(ResumeResult(3, 42, ("tower",)), away=gone))
    assert now.restarts == ()


def test_back_before_the_save_ends_the_matter_and_the_next_leave_asks_anew() -> None:
    now, act = next_step(ASKED, trains())
    assert act == Wait() and now.watch.saving is None
    assert next_step(now, trains(away=AWAY))[1] == Save()


def test_one_comes_and_another_goes_in_one_attempt() -> None:
    _, act = next_step(ASKED, trains(away=AWAY, lent=LENT, well=ABSENT, checkpoint=41))
    assert isinstance(act, Begin)
    assert act.incident.because == f"{SAID}; oldtower came back from its owner" and act.incident.left_out == frozenset()


def test_during_a_recovery_the_node_is_left_out_and_the_fault_counts() -> None:
    now, act = next_step(recovering(examined=EXAMINED), after(HaltResult(40, ALL), away={"oldtower": Away()}))
    assert act == Resume("oldtower was given back to its owner", ("oldtower",), {})
    now, _ = next_step(now, after(ResumeResult(3, 40, ("tower", "laptop"))))
    assert [restart.cause for restart in now.restarts] == [KILLED.cause]


def waits(away: dict[str, Away], halted: HaltResult) -> tuple[State, WaitBeforeRetry]:
    now, act = next_step(recovering(LEAVE, examined=Examined(None, 42)), after(halted, away=away))
    assert isinstance(act, WaitBeforeRetry) and now.phase == "waiting"
    return now, act


def test_the_only_node_is_waited_for_and_not_disturbed() -> None:
    now, act = waits(AWAY, HaltResult(42, ("laptop",)))
    assert (
        act.error is not None
        and act.error.message == f"{SAID}, and no other node is left"
        and "homelab yield laptop --back" in act.error.hint
    )
    assert act.is_for_owner, "no notice goes out"
    for at_s in (NOW + 1.0, NOW + 3600.0, NOW + WAIT_S + 1.0):
        now, act_then = next_step(now, replace(after(away=AWAY), now_s=at_s))
        assert act_then == WaitBeforeRetry(LOOK_S), "nobody is asked, and it is said once"
    now, act_then = next_step(now, replace(after(), now_s=NOW + WAIT_S + 2.0))
    assert isinstance(act_then, Halt) and act_then.asks_silent
    _, act_then = next_step(now, replace(after(HaltResult(42, ("laptop",))), now_s=NOW + WAIT_S + 3.0))
    assert act_then == Resume(SAID, (), {}), "a day with an owner is no fault, and nothing is given up"


def test_a_run_that_waits_for_an_owner_looks_for_a_node_that_was_off() -> None:
    """The laptop is its owner's, the tower was off: it may be switched on, and train alone."""
    everybody = frozenset({"laptop", "tower"})
    halted = HaltResult(42, ("laptop",))
    now, act = next_step(recovering(LEAVE, examined=Examined(None, 42)), replace(after(halted, away=AWAY), nodes=everybody))
    assert isinstance(act, WaitBeforeRetry) and act.error is not None
    now, act = next_step(now, replace(after(away=AWAY), now_s=NOW + OTHERS_S - 1.0))
    assert act == WaitBeforeRetry(LOOK_S)
    now, act = next_step(now, replace(after(away=AWAY), now_s=NOW + OTHERS_S + 1.0))
    assert isinstance(act, Halt) and act.asks_silent
    again = replace(after(halted, away=AWAY), now_s=NOW + OTHERS_S + 2.0, nodes=everybody)
    assert next_step(now, again)[1] == WaitBeforeRetry(LOOK_S, None, is_for_owner=True), "it is said once"
    _, act = next_step(now, replace(after(HaltResult(42, ("laptop", "tower")), away=AWAY), nodes=everybody))
    assert act == Resume(SAID, ("laptop",), {})


def test_a_person_stops_a_run_that_waits() -> None:
    now, _ = waits(AWAY, HaltResult(42, ("laptop",)))
    assert isinstance(next_step(now, after(away=AWAY, is_stopped=True))[1], Halt), "which ends as every stop during a recovery"


def test_the_only_shard_is_with_the_owner() -> None:
    _, act = waits(AWAY, HaltResult(42, ("tower", "laptop"), {"laptop": (1,)}))
    assert act.error is not None and act.error.message == f"{SAID}; laptop is the only node with shard 1 of the checkpoint"


def test_the_others_have_no_room() -> None:
    """Whatever is in the way, it is tried again when the node is back, and as often as after any fault."""
    tried = recovering(LEAVE, examined=Examined(None, 42))
    now, act = next_step(tried, after(SILENT, away=AWAY))
    assert act == WaitBeforeRetry(LOOK_S, SILENT)
    assert next_step(now, replace(after(away=AWAY), now_s=NOW + RETRY_S[0] - 0.1))[1] == WaitBeforeRetry(LOOK_S)
    assert isinstance(next_step(now, replace(after(away=AWAY), now_s=NOW + RETRY_S[0]))[1], Halt)
    assert isinstance(next_step(now, replace(after(), now_s=NOW + 0.1))[1], Halt), "at once"


def test_a_fault_may_last_a_day_after_the_owner_has_given_it_back() -> None:
    waiting = Recovering(LEAVE, NOW - WAIT_S - 5.0, Examined(None, 42))
    now, _ = next_step(state("recovering", recovering=waiting), after(SILENT, away=AWAY))
    now, _ = next_step(now, after())
    assert isinstance(next_step(now, after(SILENT))[1], WaitBeforeRetry)


def test_metrics_are_gathered_while_a_save_is_waited_for() -> None:
    assert next_step(replace(ASKED, watch=replace(ASKED.watch, collected_s=-1e9)), trains(away=AWAY))[1] == Collect()
