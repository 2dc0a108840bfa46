"""Every decision of a run's supervisor, one row per case: in this state, seeing this, it does that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.base.hint import Hint
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.supervise.acts import (
    Act,
    Begin,
    Collect,
    End,
    Examine,
    Follow,
    GiveUp,
    Halt,
    Incident,
    Resume,
    Review,
    Save,
    Wait,
    WaitBeforeRetry,
    WriteProgress,
)
from homelab.controller.features.supervise.observation import Examined, Failed, Followed, HaltResult, Observation, ResumeResult
from homelab.controller.features.supervise.restart_policy import Decision
from homelab.controller.features.supervise.step import (
    CUT_SHORT,
    FIRST_COLLECT_S,
    REFUSED_S,
    WAIT_S,
    Phase,
    Recovering,
    State,
    Watch,
    next_step,
)
from homelab.controller.run.leave import Away
from homelab.controller.run.restart import Restart
from homelab.shared.recipe import Checkpoint, LogPolicy, Recovery

NOW, TIME = 1000.0, 1e9
ABSENT = frozenset({"oldtower"})
WELL, DONE = AttemptVerdict("well"), AttemptVerdict("done")
BLIND = AttemptVerdict("well", because="nothing is heard of laptop", blind=("laptop",))
DEAD = AttemptVerdict("dead-rank", ("laptop",), (1,), "the process of rank 1 on laptop is gone")
STOPPED = AttemptVerdict("stopped", because="it was stopped by hand")
SUPERSEDED = AttemptVerdict("superseded", because="a node knows a newer attempt")
KILLED = Diagnosis(
    cause="killed", title="rank 1 on laptop was killed", first_node="laptop", first_rank=1, hint=Hint("look"), retryable=True
)
PYTHON_ERROR = KILLED.model_copy(update={"cause": "python-error", "retryable": False})
OUT_OF_MEMORY = KILLED.model_copy(update={"cause": "cuda-out-of-memory"})
FAILURE = Incident(DEAD, TIME, frozenset())
REJOIN = Incident(None, TIME, frozenset(), ("oldtower",))
RECUT = Incident(None, TIME, ABSENT, recut="a step takes 2 s with other layers")
SILENT = Failed("other", "laptop does not answer", "wake it", "laptop does not answer\nfix: wake it")
OTHER_TRAINING = Failed("other-training", "the recipe was changed", "put it back", "")
RESTART = Restart(TIME, "killed", "laptop", 40)
GO_ON = Decision("go-on", KILLED.title, "killed", "laptop")


def state(phase: Phase = "watching", **changes: Any) -> State:
    """Of attempt 2, which was reported and collected a moment ago; `oldtower` is not in it."""
    watch = Watch(ABSENT, reported="", collected_s=NOW - 1.0)
    return replace(State(2, Recovery(), Checkpoint(every_steps=10), phase=phase, watch=watch), **changes)


def watching(**changes: Any) -> State:
    """With another watch."""
    return state(watch=replace(Watch(ABSENT, reported="", collected_s=NOW - 1.0), **changes))


def recovering(incident: Incident = FAILURE, *, phase: Phase = "recovering", of: State | None = None, **changes: Any) -> State:
    """In the middle of a recovery."""
    return replace(of or state(), phase=phase, recovering=replace(Recovering(incident, NOW - 5.0), **changes))


def seen(verdict: AttemptVerdict | None = None, **more: Any) -> Observation:
    """While watching."""
    return Observation(NOW, TIME, verdict=verdict, **more)


def after(result: Any = None, **more: Any) -> Observation:
    """When an act has come to this result."""
    return Observation(NOW, TIME, result=result, **more)


@dataclass(frozen=True)
class Case:
    """`then`: attributes of the state that follows."""

    what: str
    before: State
    seen: Observation
    act: Act
    then: dict[str, Any]


def case(what: str, before: State, seen: Observation, act: Act, **then: Any) -> Case:
    return Case(what, before, seen, act, then)


EXAMINED = Examined(KILLED, 45)
EXAMINED_STATE = recovering(examined=EXAMINED)
DECIDED = recovering(examined=EXAMINED, decision=GO_ON)
HALTED = after(HaltResult(40, ("tower", "laptop", "oldtower")))

CASES = [
    # ---- the beginning
    case("a new supervisor follows the newest attempt", state("new"), after(), Follow(), phase="watching"),
    case("one whose predecessor was ended while it recovered looks first", state("new", was_cut_short=True), after(), Review(), phase="reviewing"),
    case("unless a person has stopped the run", state("new", was_cut_short=True), after(is_stopped=True), Follow(), phase="watching"),
    case("the run was done all the same", state("reviewing"), seen(DONE), Follow(), phase="watching"),
    case("a person stops the run during that look", state("reviewing"), seen(is_stopped=True), Follow(), phase="watching"),
    case("what the predecessor has stopped is recovered", state("reviewing"), seen(STOPPED), Begin(Incident(CUT_SHORT, TIME, frozenset())), phase="recovering"),
    # ---- watching
    case("the first look at an attempt is written down", state(), seen(WELL, result=Followed(3, ABSENT)), WriteProgress("watching", "attempt 3"), attempt=3),
    case("metrics are gathered at once", watching(collected_s=-1e9), seen(WELL), Collect()),
    case("metrics are gathered every 20 s", watching(collected_s=NOW - 20.1), seen(WELL), Collect()),
    case("a well attempt is waited for", state(), seen(WELL), Wait()),
    case("a node that is not heard is written down", state(), seen(BLIND), WriteProgress("watching", "nothing is heard of laptop")),
    case("once", watching(reported=BLIND.because), seen(BLIND), Wait()),
    case("that it is heard again, too", watching(reported=BLIND.because), seen(WELL), WriteProgress("watching", "attempt 2")),
    case("a person stops the run here", state(), seen(is_stopped=True), End("stopped", "stopped", ABSENT, collects=True)),
    case("a person stops the run elsewhere", state(), seen(STOPPED), End("stopped", "it was stopped by hand", ABSENT, collects=True)),
    case("the run is done", state(), seen(DONE), End("done", "done", ABSENT, collects=True)),
    case("a left-out node that is healthy again has what was prepared there", state(), seen(DONE, well=ABSENT), End("done", "done", ABSENT, collects=True)),
    case("another controller has recovered it: its nodes are left alone", state(), seen(SUPERSEDED), End("superseded", SUPERSEDED.because, collects=True)),
    case("a rank has died", state(), seen(DEAD), Begin(Incident(DEAD, TIME, ABSENT)), phase="recovering", recovering=Recovering(Incident(DEAD, TIME, ABSENT), NOW)),
    case("and the left-out node is healthy again: it is asked, too", state(), seen(DEAD, well=ABSENT), Begin(FAILURE)),
    # ---- a node that was left out comes back
    case("it waits for the next checkpoint", state(), seen(WELL, well=ABSENT, checkpoint=40), Wait(), watch=Watch(ABSENT, "", NOW - 1.0, {"oldtower": 40})),
    case("then it is taken back", watching(first_seen={"oldtower": 40}), seen(WELL, well=ABSENT, checkpoint=50), Begin(REJOIN), phase="recovering"),
    case("another cut pays", state(), seen(WELL, checkpoint=50, recut=RECUT.recut), Begin(RECUT), phase="recovering"),
    case("not while a node is not heard", watching(reported=BLIND.because), seen(BLIND, checkpoint=50, recut=RECUT.recut), Wait()),
    case("not while a node is not heard", watching(first_seen={"oldtower": 40}, reported=BLIND.because), seen(BLIND, well=ABSENT, checkpoint=50), Wait()),
    case("it is ill again: it waits anew", watching(first_seen={"oldtower": 40}), seen(WELL, checkpoint=50), Wait(), watch=Watch(ABSENT, "", NOW - 1.0, {})),
    case("it came back in vain: not for a while", state(refused={"oldtower": NOW + 1.0}), seen(WELL, well=ABSENT, checkpoint=50), Wait(), watch=Watch(ABSENT, "", NOW - 1.0, {})),
    case("and after a while again", state(refused={"oldtower": NOW}), seen(WELL, well=ABSENT, checkpoint=50), Wait(), watch=Watch(ABSENT, "", NOW - 1.0, {"oldtower": 50})),
    case("its owner wants a node (all of that is in test_leaving.py)", state(), seen(WELL, away={"laptop": Away()}, save="asked"), Save()),
    # ---- a recovery that succeeds
    case("it is examined", recovering(), after(), Examine(FAILURE)),
    case("then halted; a checkpoint was due", recovering(), after(EXAMINED), Halt(may_begin_again=False, asks_silent=False), recovering=EXAMINED_STATE.recovering),
    case("then halted; none was due", recovering(), after(Examined(KILLED, 9)), Halt(may_begin_again=True, asks_silent=False)),
    case("then resumed", EXAMINED_STATE, HALTED, Resume(KILLED.title, (), {}), recovering=DECIDED.recovering),
    case("memory ran out: half the micro-batch", recovering(examined=Examined(OUT_OF_MEMORY, 45)), HALTED, Resume(KILLED.title, (), {"laptop": 1})),
    case("its owner excludes a node that says something", recovering(examined=Examined(KILLED, 45, (("laptop", LogPolicy(pattern="Xid", action="exclude")),))), HALTED,
         Resume(KILLED.title, ("laptop",), {})),
    case("without a diagnosis the verdict counts", recovering(examined=Examined(None, 45)), HALTED, Resume(DEAD.because, (), {})),
    case("a node that comes back needs no reason", recovering(REJOIN, of=state(recovery=Recovery(max_restarts=0)), examined=Examined(None, 45)), HALTED,
         Resume("oldtower is healthy again", (), {})),
    case("the next attempt is written down, and why", DECIDED, after(ResumeResult(3, 40, ("tower", "laptop"))),
         WriteProgress("watching", f"attempt 3 continues after step 40: {KILLED.title}"), phase="resumed", attempt=3, restarts=(RESTART,), refused={}),
    case("then it is followed", recovering(phase="resumed"), after(), Follow(), phase="watching", recovering=None),
    case("what a program makes of its checkpoint is not known", DECIDED, after(ResumeResult(3, 40, ("tower",), is_program=True)),
         WriteProgress("watching", f"attempt 3: the program was started again; it had step-40: {KILLED.title}")),
    case("a program without a checkpoint", DECIDED, after(ResumeResult(3, 0, ("tower",), is_program=True)),
         WriteProgress("watching", f"attempt 3: the program was started again; it had no checkpoint: {KILLED.title}")),
    case("to take a node back is no restart", recovering(REJOIN, examined=EXAMINED, decision=GO_ON), after(ResumeResult(3, 40, ("tower", "oldtower"))),
         WriteProgress("watching", f"attempt 3 continues after step 40: {KILLED.title}"), restarts=(), refused={}),
    case("it was not well after all", recovering(REJOIN, examined=EXAMINED, decision=GO_ON), after(ResumeResult(3, 40, ("tower", "laptop"))),
         WriteProgress("watching", f"attempt 3 continues after step 40: {KILLED.title}"), refused={"oldtower": NOW + REFUSED_S}),
    # ---- a recovery that has to wait
    case("a node does not answer: wait, and say why", EXAMINED_STATE, after(SILENT), WaitBeforeRetry(2.0, SILENT), phase="waiting",
         recovering=Recovering(FAILURE, NOW - 5.0, EXAMINED, asks_silent=True, tries=1, said=SILENT.message)),
    case("longer each time, and say it once", recovering(examined=EXAMINED, tries=2, said=SILENT.message), after(SILENT), WaitBeforeRetry(10.0), phase="waiting"),
    case("not longer than 30 s", recovering(examined=EXAMINED, tries=99, said=SILENT.message), after(SILENT), WaitBeforeRetry(30.0)),
    case("another error is said", recovering(examined=EXAMINED, tries=1, said="a port is taken"), after(SILENT), WaitBeforeRetry(5.0, SILENT)),
    case("then it is tried again, with the nodes that were silent", recovering(phase="waiting", examined=EXAMINED, asks_silent=True), after(),
         Halt(False, asks_silent=True), phase="recovering"),
    case("the examination itself failed: it is made again", recovering(phase="waiting"), after(), Examine(FAILURE), phase="recovering"),
    case("and nodes that were silent then are still silent", recovering(), after(SILENT),
         WaitBeforeRetry(2.0, SILENT), recovering=Recovering(FAILURE, NOW - 5.0, tries=1, said=SILENT.message)),
    # ---- a recovery that ends the supervision
    case("a person stops the run elsewhere meanwhile", EXAMINED_STATE, after(Failed("stopped", "stopped")), End("stopped", records_stop=True)),
    case("a person stops the run here meanwhile", EXAMINED_STATE, after(SILENT, is_stopped=True), End("stopped")),
    case("a person stops the run before it is resumed", EXAMINED_STATE, replace(HALTED, is_stopped=True), End("stopped")),
    case("another controller has recovered it meanwhile", EXAMINED_STATE, after(Failed("superseded", "it has gone on")), End("superseded", "it has gone on")),
    case("trying again would not help", recovering(examined=Examined(PYTHON_ERROR, 45)), HALTED,
         GiveUp(f"{KILLED.title}; trying again would end the same way", "look", "python-error"), phase="giving-up"),
    case("the recipe says: by hand", recovering(of=state(recovery=Recovery(auto=False)), examined=EXAMINED), HALTED,
         GiveUp(f"{KILLED.title}; [recovery] auto is off", "look", "killed")),
    case("too often", recovering(of=state(recovery=Recovery(max_restarts=1), restarts=(RESTART,)), examined=EXAMINED), HALTED,
         GiveUp(f"{KILLED.title}; 1 restarts within the last hour, and [recovery] max_restarts = 1", "look", "killed")),
    case("it would be another training: nothing is waited for, nothing goes on", EXAMINED_STATE, after(OTHER_TRAINING),
         GiveUp("the recipe was changed", "put it back", "killed", stops_nodes=True)),
    case("that is seen before the examination", recovering(), after(OTHER_TRAINING), GiveUp("the recipe was changed", "put it back", None, stops_nodes=True)),
    case("it has waited for a day", recovering(examined=EXAMINED, since_s=NOW - WAIT_S - 1.0), after(SILENT), GiveUp(SILENT.message, SILENT.hint, "killed", stops_nodes=True)),
    case("it has waited for almost a day", recovering(examined=EXAMINED, since_s=NOW - WAIT_S), after(SILENT), WaitBeforeRetry(2.0, SILENT)),
    case("given up is the end", recovering(phase="giving-up"), after(), End("given up")),
    case("unless a person has stopped it", recovering(phase="giving-up"), after(is_stopped=True), End("stopped")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_next_step(case: Case) -> None:
    then, act = next_step(case.before, case.seen)
    assert act == case.act
    for name, value in case.then.items():
        assert getattr(then, name) == value, name


def test_every_act_and_every_phase_has_a_case() -> None:
    assert {type(case.act) for case in CASES} == set(Act.__args__)
    phases = {"new", "reviewing", "watching", "recovering", "waiting", "resumed", "giving-up"}
    assert {case.before.phase for case in CASES} == phases
    assert {case.then["phase"] for case in CASES if "phase" in case.then} == phases - {"new"}


def test_after_every_act_the_state_can_be_stepped_from() -> None:
    """A whole life: it fails, cannot be reached, goes on, a node comes back, it is done."""
    results: list[Observation] = [
        after(), seen(WELL, result=Followed(1, frozenset())), Observation(NOW + FIRST_COLLECT_S + 1.0, TIME, verdict=WELL), seen(DEAD),
        after(), after(SILENT), after(), after(EXAMINED),
        after(SILENT), after(), HALTED, after(ResumeResult(2, 40, ("tower", "laptop"))), after(), seen(WELL, result=Followed(2, ABSENT)),
        seen(WELL), seen(WELL, well=ABSENT, checkpoint=40), seen(WELL, well=ABSENT, checkpoint=50), after(), after(Examined(None, 51)), HALTED,
        after(ResumeResult(3, 50, ("tower", "laptop", "oldtower"))), after(), seen(DONE, result=Followed(3, frozenset())),
    ]  # fmt: skip
    now, acts = State(1, Recovery(), Checkpoint(every_steps=10)), []
    for observation in results:
        now, act = next_step(now, observation)
        acts.append(type(act))
    assert acts == [
        Follow, WriteProgress, Collect, Begin, Examine, WaitBeforeRetry, Examine, Halt,
        WaitBeforeRetry, Halt, Resume, WriteProgress, Follow, WriteProgress,
        Wait, Wait, Begin, Examine, Halt, Resume,
        WriteProgress, Follow, End,
    ]  # fmt: skip
    assert now.restarts == (RESTART,) and now.attempt == 3
