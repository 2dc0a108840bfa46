"""What is trouble, whose, and what is none: one verdict from what each node said last."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.attempt import watchdog
from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.features.supervise.step_durations import StepTimeWindow
from homelab.shared.protocol.rank_messages import RankStatus
from homelab.shared.protocol.run_messages import Exit

pytestmark = pytest.mark.timeout(10)

NODES = ("tower", "laptop", "oldtower")


def sign(rank: int, **changes: Any) -> NodeStatus:
    """A node whose one rank trains well; `rank_*` changes its rank."""
    of_rank = {key[5:]: value for key, value in changes.items() if key.startswith("rank_")}
    of_node = {key: value for key, value in changes.items() if not key.startswith("rank_")}
    trained = RankStatus(**{"pid": 7, "state": "R", "phase": "training", "step": 12, "still_s": 0.4, **of_rank})
    return NodeStatus(
        **{"attempt": 1, "newest": 1, "started": True, "agent": "S", "torchrun": "S", "ranks": {rank: trained}, "heard_s": 0.2, **of_node}
    )


def all_signs(**changes: dict[str, Any]) -> dict[str, NodeStatus]:
    """All nodes well, but for the changes of some."""
    return {name: sign(rank, **changes.get(name, {})) for rank, name in enumerate(NODES)}


def judge(signs: dict[str, NodeStatus], step_s: float | None = 1.0, planned_s: float | None = None) -> watchdog.AttemptVerdict:
    return watchdog.judge(1, NODES, signs, step_s, planned_s)


DONE = {"exit": Exit(returncode=0), "torchrun": "", "agent": "", "rank_phase": "done", "rank_state": ""}
STILL = {"rank_still_s": 8.0}
HANGS = {"rank_still_s": 31.0}


def test_a_run_that_trains_is_well() -> None:
    assert judge(all_signs()) == watchdog.AttemptVerdict("well")


@pytest.mark.parametrize(
    ("changes", "kind", "nodes", "ranks"),
    [
        ({"laptop": {"rank_state": ""}}, "dead-rank", ("laptop",), (1,)),
        ({"laptop": {"rank_state": "Z"}}, "dead-rank", ("laptop",), (1,)),
        ({"laptop": {"exit": Exit(returncode=1), "rank_state": ""}}, "exit", ("laptop",), ()),
        ({"laptop": {"torchrun": "", "rank_phase": "loading"}}, "exit", ("laptop",), ()),
        ({"laptop": {"rank_state": "T", "rank_still_s": 3.5}}, "frozen-rank", ("laptop",), (1,)),
        (dict.fromkeys(NODES, HANGS), "hang", (), ()),
        ({"tower": HANGS, "laptop": {"rank_still_s": 31.0, "rank_step": 11}, "oldtower": HANGS}, "hang", (), (1,)),
        ({name: {**STILL, "missing_s": {"laptop": 4.5}} for name in ("tower", "oldtower")} | {"laptop": STILL}, "hang", (), ()),
        ({"tower": {"rank_still_s": 13.0}, "laptop": {"heard_s": 6.0}, "oldtower": {"rank_still_s": 13.0}}, "silent-node", ("laptop",), ()),
        ({name: {"exit": Exit(signal=15, stopped=True)} for name in NODES}, "stopped", (), ()),
        ({name: {"stopping": True} for name in NODES} | {"laptop": {"stopping": True, "rank_state": ""}}, "stopped", (), ()),
        (dict.fromkeys(NODES, DONE), "done", (), ()),
        ({"tower": {"newest": 2}}, "superseded", (), ()),
    ],
    ids=["killed", "zombie", "torchrun failed", "torchrun killed", "stopped", "hang", "one is behind", "it is mute", "cut off", "by hand", "elsewhere", "done", "superseded"],
)  # fmt: skip
def test_what_is_the_matter_and_who_is_to_blame(
    changes: dict[str, dict[str, Any]], kind: str, nodes: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    found = judge(all_signs(**changes))
    assert (found.kind, found.nodes, found.ranks) == (kind, nodes, ranks)
    assert found.is_trouble == (kind in watchdog.TROUBLE)
    assert found.because or kind == "done"


@pytest.mark.parametrize(
    "changes",
    [
        {"laptop": {"heard_s": 60.0}},  # its sshd died, or we are cut off from it: no step of the others ends without it
        {name: {"heard_s": 60.0} for name in NODES},  # we are cut off from all
        dict.fromkeys(NODES, STILL),  # one of them is slowed to a tenth
        # and says so with every pass
        {"tower": {"rank_still_s": 600.0}, "laptop": {"rank_still_s": 1.2}, "oldtower": {"rank_still_s": 600.0}},
        {"tower": STILL, "laptop": {"heard_s": 9.0}, "oldtower": STILL},  # and its follower gets no processor beside it
        {"laptop": {"agent": ""}},  # the agent alone was killed: torchrun goes on
        {"tower": {"rank_phase": "saving", "rank_still_s": 40.0}, "laptop": STILL, "oldtower": STILL},  # the others wait for its disk
        {name: {"rank_phase": "loading", "rank_still_s": 200.0} for name in NODES},
        {name: {"rank_phase": "evaluating", "rank_still_s": 200.0} for name in NODES},
        {"laptop": {"rank_state": "T", "rank_still_s": 1.0}},  # somebody looks at it with a debugger
        {"laptop": DONE, "tower": {"rank_phase": "saving"}},  # the last ones write the final model
    ],
    ids=["one is not heard", "nobody is heard", "slow", "very slow", "slow and not heard", "agent killed", "slow disk", "loading", "evaluating", "debugger", "finishing"],
)  # fmt: skip
def test_what_is_no_trouble(changes: dict[str, dict[str, Any]]) -> None:
    assert judge(all_signs(**changes)).kind == "well"


def test_who_is_not_heard_is_said() -> None:
    assert judge(all_signs(laptop={"heard_s": 60.0})).blind == ("laptop",)
    silent = {name: known for name, known in all_signs().items() if name != "laptop"}  # it never spoke
    assert judge(silent).blind == ("laptop",)


def test_a_rank_that_is_done_though_its_agent_was_killed_counts_as_done() -> None:
    signs = all_signs(**{name: {**DONE, "exit": None} for name in NODES})
    assert judge(signs).kind == "done"


def confirmed(**then: dict[str, Any]) -> watchdog.AttemptVerdict:
    """The laptop's rank was seen dead; what holds when the nodes have said these things."""
    first = judge(all_signs(laptop={"rank_state": ""}))
    assert first.kind == "dead-rank"
    signs = all_signs(**then)
    return watchdog.confirmed(first, judge(signs), signs)


def test_an_end_that_was_seen_is_judged_by_torchruns_own_word() -> None:
    assert confirmed(**dict.fromkeys(NODES, DONE)).kind == "done"
    assert confirmed(laptop=DONE, tower={"rank_phase": "saving"}).kind == "well", "it ended well, and the others are about to"
    assert confirmed(**{name: {"stopping": True} for name in NODES}).kind == "stopped"
    failed = {"exit": Exit(returncode=1), "rank_state": ""}
    assert confirmed(**dict.fromkeys(NODES, failed)).kind == "dead-rank", "the first word tells most"
    assert confirmed(laptop={"rank_state": ""}).kind == "dead-rank"
    assert confirmed(laptop={"rank_state": "", "heard_s": 9.0}).kind == "dead-rank", "that it fell silent since is no proof of its health"


def test_the_moment_between_torchruns_end_and_the_agents_word_of_it_is_no_trouble() -> None:
    signs = all_signs(laptop={"torchrun": "", "rank_phase": "done", "rank_state": ""})
    assert judge(signs).kind == "well"
    script = {name: known.replace(ranks={}, torchrun="") for name, known in all_signs().items()}
    assert judge(script).kind == "well"
    assert judge({**script, "laptop": script["laptop"].replace(agent="")}).kind == "exit"


def test_a_run_that_is_done_ends_though_one_node_is_not_heard_any_more() -> None:
    signs = all_signs(**dict.fromkeys(NODES, DONE))
    gone = {**signs, "laptop": sign(1, heard_s=30.0)}
    assert judge(gone).kind == "done"
    assert judge({**signs, "laptop": sign(1, rank_phase="saving")}).kind == "well"


def test_a_slow_step_is_no_hang_and_the_first_step_has_time() -> None:
    signs = all_signs(**{name: {"rank_still_s": 200.0} for name in NODES})
    assert judge(signs, step_s=20.0).kind == "well", "slowed to a tenth, in one pass"
    assert judge(signs, step_s=5.0).kind == "hang"
    assert judge(signs, step_s=None).kind == "well"
    late = all_signs(**{name: {"rank_still_s": watchdog.FIRST_STEP_S["whole"] + 1} for name in NODES})
    assert judge(late, step_s=None).kind == "hang"


@pytest.mark.parametrize("company", ["whole", "unheard", "cut"])
def test_a_first_step_that_the_plan_expects_to_take_minutes_may_take_four_times_as_long(company: watchdog.Company) -> None:
    """One step of recipes/llama7b-lora.toml on an RTX 2060 Super alone: 275 s by the plan."""
    assert watchdog.limit_s("training", None, company, 275.0) == 1100.0
    assert watchdog.limit_s("training", None, company, 0.3) == watchdog.limit_s("training", None, company) == watchdog.FIRST_STEP_S[company]
    assert watchdog.limit_s("training", 10.0, company, 275.0) < 275.0, "what was seen counts more"
    late = all_signs(**{name: {"rank_still_s": 1000.0, "rank_step": 0} for name in NODES})
    assert judge(late, None, 275.0).kind == "well" and judge(late, None, 200.0).kind == "hang"


def test_while_a_node_is_not_heard_waiting_for_it_is_the_likelier_cause() -> None:
    at_the_door: dict[str, Any] = {name: {"rank_phase": "loading", "rank_still_s": 130.0} for name in NODES}
    assert judge(all_signs(**at_the_door)).kind == "well"
    for lost in (
        all_signs(**{**at_the_door, "laptop": {"heard_s": 21.0}}),
        {name: known for name, known in all_signs(**at_the_door).items() if name != "laptop"},
    ):
        found = judge(lost)
        assert (found.kind, found.nodes) == ("silent-node", ("laptop",))
    # A large model takes minutes to load: a node that is not heard for a moment is no reason to begin again.
    assert judge(all_signs(**{**at_the_door, "laptop": {"heard_s": 10.0}})).kind == "well"
    loading: dict[str, Any] = {name: {"rank_phase": "loading", "rank_still_s": 25.0} for name in NODES}
    assert judge(all_signs(**{**loading, "laptop": {"heard_s": 60.0}})).kind == "well"


def test_who_is_reached_by_others_may_only_be_busy() -> None:
    def seen(missed_s: float, **of_laptop: Any) -> dict[str, NodeStatus]:
        waits = {"rank_phase": "loading", "rank_still_s": 60.0, "missing_s": {"laptop": missed_s}}
        return all_signs(tower=waits, oldtower=waits | {"missing_s": {}}, laptop={"heard_s": 60.0, **of_laptop})

    assert judge(seen(0.0)).kind == "well", "its memory is short while it loads, and its follower does not come to a word"
    assert judge(seen(4.5)).nodes == ("laptop",)


def test_a_rank_that_is_seen_to_work_is_waited_for_however_long_it_loads() -> None:
    waits = {"rank_phase": "loading", "rank_still_s": 5000.0}
    assert judge(all_signs(tower=waits, laptop={"rank_phase": "loading", "rank_still_s": 2.0}, oldtower=waits)).kind == "well"
    assert judge(all_signs(**dict.fromkeys(NODES, waits))).kind == "hang"


@pytest.mark.parametrize("phase", ["absent", "starting", "loading", "connecting", "fetching", "training", "evaluating"])
def test_who_is_not_heard_and_not_reached_by_anybody_is_gone_whatever_the_others_do(phase: str) -> None:
    def seen(*missing_s: float | None, **of_laptop: Any) -> dict[str, NodeStatus]:
        busy = {
            name: {"rank_phase": phase, "rank_step": 0, "missing_s": {} if missed is None else {"laptop": missed}}
            for name, missed in zip(("tower", "oldtower"), missing_s, strict=True)
        }
        return all_signs(**busy, laptop={"heard_s": 6.0, **of_laptop})

    found = judge(seen(4.5, 6.0), step_s=60.0)
    assert (found.kind, found.nodes) == ("silent-node", ("laptop",)) and "tower, oldtower cannot reach it" in found.because
    assert judge(seen(4.5, None), step_s=60.0).kind == "silent-node", "a firewall keeps one from asking"
    for reached in (seen(4.5, 0.0), seen(4.5, 3.0), seen(None, None), seen(9.0, 9.0, heard_s=1.0)):
        assert judge(reached, step_s=60.0).kind == "well"


def test_what_is_being_saved_is_saved_to_its_end() -> None:
    def seen(*still_s: float) -> dict[str, NodeStatus]:
        busy = {
            name: {"rank_phase": "saving", "missing_s": {"laptop": 9.0}, "rank_still_s": still}
            for name, still in zip(("tower", "oldtower"), still_s, strict=True)
        }
        return all_signs(**busy, laptop={"heard_s": 9.0})

    assert judge(seen(1.0, 1.0)).kind == judge(seen(30.0, 1.0)).kind == "well", "one of them is seen to write"
    assert judge(seen(11.0, 30.0)).nodes == ("laptop",), "they wait for it in the save: nobody writes any more"


def test_a_node_that_runs_any_program_can_be_missed() -> None:
    signs = {name: known.replace(ranks={}, missing_s={"laptop": 9.0}) for name, known in all_signs(laptop={"heard_s": 9.0}).items()}
    assert judge(signs, step_s=None).nodes == ("laptop",)


def test_the_pace_is_that_of_the_slowest_steps_and_knows_no_saving() -> None:
    pace = StepTimeWindow()
    now = 0.0
    for step in range(1, 12):
        now += 2.0 if step == 6 else 1.0
        pace.see({"tower": sign(0, rank_step=step)}, now)
    assert pace.step_s == pytest.approx(2.0)
    pace.see({"tower": sign(0, rank_step=11, rank_phase="saving")}, now + 1)
    pace.see({"tower": sign(0, rank_step=12)}, now + 100)
    assert pace.step_s == pytest.approx(2.0)


def test_before_two_steps_nobody_knows_the_pace() -> None:
    pace = StepTimeWindow()
    pace.see({"tower": sign(0, rank_step=1)}, 0.0)
    pace.see({"tower": sign(0, rank_step=2)}, 1.0)
    assert pace.step_s is None
    assert StepTimeWindow(0.7).step_s == 0.7, "an earlier attempt knew it"
