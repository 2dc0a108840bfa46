"""The collective smoke test without a network: when it is over and who is named, and what the judges make of its result."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.collective import judge as judges
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.facts.collective_check import CollectiveResult, Measured, RankState, WrongSum, seconds_text
from homelab.controller.facts.node import CollectiveFacts
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight import collective_check as control
from homelab.controller.features.preflight import collective_state
from homelab.controller.features.preflight.collective_state import CollectiveTestState
from homelab.node.probes import collective_check as probe
from homelab.shared.protocol.collective_messages import CollectiveLine
from homelab.shared.protocol.message import as_json
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)

RANKS = {"tower": (0,), "laptop": (1,), "oldtower": (2, 3)}


def line(phase: str = "waiting for the other nodes", ended: dict[str, Any] | None = None, **ranks: Any) -> CollectiveLine:
    """A line of an agent; `r1="joining"`, or r1={...}."""
    entries = {name[1:]: {"stage": entry} if isinstance(entry, str) else entry for name, entry in ranks.items()}
    return read(CollectiveLine, {"phase": phase, "ranks": entries, "ended": ended})


class Play:
    """A test whose clock we turn; all nodes speak every second what they said last."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.stages = CollectiveTestState(RANKS, self.now)
        self.lines = {node: line("starting torchrun") for node in RANKS}

    def say(self, **lines: CollectiveLine) -> None:
        self.lines |= lines
        for node, entry in self.lines.items():
            self.stages.hear(node, entry, self.now)

    def run(self, seconds: float, mute: str = "") -> collective_state.CollectiveOutcome | None:
        """Let so many seconds pass, or until it is over."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for node, entry in self.lines.items():
                if node != mute:
                    self.stages.hear(node, entry, self.now)
            outcome = self.stages.outcome(self.now)
            if outcome is not None:
                return outcome
        return None


def all_at(stage: str) -> dict[str, CollectiveLine]:
    return {"tower": line(r0=stage), "laptop": line(r1=stage), "oldtower": line(r2=stage, r3=stage)}


def test_it_is_over_when_all_are_done() -> None:
    play = Play()
    play.say(**all_at("64 MB"))
    assert play.stages.outcome(play.now) is None
    play.say(**all_at("done"))
    assert play.stages.outcome(play.now) == collective_state.CollectiveOutcome("done")


def test_ranks_behind_the_others_are_missing_at_the_limit() -> None:
    play = Play()
    play.say(tower=line(r0="joining"), laptop=line(r1="joining"), oldtower=line(r2="joining", r3="joining"))
    play.say(tower=line(r0="1 MB"), laptop=line(r1="1 MB"))
    outcome = play.run(100)
    assert outcome is not None and outcome.kind == "stuck"
    assert [(state.rank, state.node, state.stage) for state in outcome.missing] == [(2, "oldtower", "joining"), (3, "oldtower", "joining")]
    assert 59 <= play.now - 100.0 <= 62


def test_a_node_whose_torchrun_never_gets_through_is_missing() -> None:
    play = Play()
    play.say(tower=line(), laptop=line(), oldtower=line("connecting to the head"))
    outcome = play.run(100)
    assert outcome is not None and {state.node for state in outcome.missing} == {"oldtower"}
    assert outcome.missing[0].stage == "connecting to the head"


def test_nobody_is_missing_where_all_stand_at_the_same_place() -> None:
    play = Play()
    play.say(**all_at("joining"))
    outcome = play.run(100)
    assert outcome is not None and outcome.kind == "stuck" and outcome.missing == ()
    assert "rank 3 (oldtower) at: joining" in outcome.error


def test_a_slow_import_is_waited_for_and_said() -> None:
    play = Play()
    play.say(**all_at("joining") | {"laptop": line(r1="importing torch")})
    assert play.stages.progress(play.now) == "collective test: importing torch"
    assert play.run(100) is None
    assert "importing torch on laptop (slow: waiting up to 180 s)" in play.stages.progress(play.now)
    play.say(**all_at("8 bytes"))
    assert play.run(50) is None  # the 60 s begin anew
    play = Play()
    play.say(**all_at("joining") | {"laptop": line(r1="importing torch")})
    outcome = play.run(300)
    assert outcome is not None and 179 <= play.now - 100 <= 182 and [state.node for state in outcome.missing] == ["laptop"]


def test_a_silent_node_is_named_long_before_the_limit() -> None:
    play = Play()
    play.say(**all_at("64 MB"))
    outcome = play.run(60, mute="laptop")
    assert outcome is not None and [(state.node, state.is_silent) for state in outcome.missing] == [("laptop", True)]
    assert play.now - 100 <= collective_state.SILENT_S + 2


def test_a_ranks_own_words_count_before_those_who_lost_it() -> None:
    play = Play()
    play.say(**all_at("1 MB"))
    lost = {"stage": "1 MB", "error": "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:1234"}
    play.say(tower=line(r0=lost), laptop=line(r1=lost))
    assert play.run(2) is None
    ended = {"returncode": 1, "log": ["  traceback : Signal 9 (SIGKILL) received by PID 77"], "errors": []}
    play.say(oldtower=line(r2="1 MB", r3="1 MB", ended=ended))
    outcome = play.run(5)
    assert outcome is not None and (outcome.node, outcome.error) == ("oldtower", "a rank was ended by SIGKILL")


def test_where_all_only_lost_a_peer_those_behind_are_missing() -> None:
    play = Play()
    play.say(**all_at("8 bytes"))
    late = {"stage": "1 MB", "error": "RuntimeError: Timed out waiting 75000ms for recv operation to complete"}
    play.say(tower=line(r0=late), laptop=line(r1=late))
    outcome = play.run(20)
    assert outcome is not None and outcome.kind == "failed" and {state.rank for state in outcome.missing} == {2, 3}


def test_an_import_error_ends_it_at_once() -> None:
    play = Play()
    ended = {"returncode": 1, "log": ["Traceback (most recent call last):", "ImportError: libcudart.so.12: cannot open"], "errors": []}
    play.say(laptop=line("starting torchrun", ended=ended))
    outcome = play.run(5)
    assert outcome == collective_state.CollectiveOutcome("failed", "ImportError: libcudart.so.12: cannot open", "laptop")
    assert play.now <= 102


@pytest.mark.parametrize("bad", [line("dancing"), line(r7="joining"), line(r0="joining"), line(r1="dancing")])
def test_what_our_agent_does_not_say_is_refused(bad: CollectiveLine) -> None:
    with pytest.raises(ValueError):
        Play().stages.hear("laptop", bad, 101.0)


@pytest.mark.parametrize(
    "said", [b'{"phase": "joi', b"[1]", b'{"phase": "joining", "ranks": {"-1": {}}}', b"[" * 100_000, b"\xff\xfe", b"null", None]
)
def test_a_node_that_answers_half_is_lost_and_named(said: bytes | None) -> None:
    play = Play(time.monotonic())
    play.say(**all_at("joining"))
    control._take(play.stages, "laptop", said)
    control._take(play.stages, "laptop", b'{"phase": "joining", "ranks": {}}')
    outcome = play.stages.outcome(time.monotonic() + 1)
    assert outcome is not None and outcome.kind == "failed" and outcome.node == "laptop"
    assert [state.node for state in outcome.missing] == ["laptop"]


@pytest.mark.parametrize(
    "said", [{"size_bytes": 8}, {"size_bytes": "x"}, {"size_bytes": 8, "seconds": "nan", "bus_bytes_per_s": 1, "cpu_s": 1}]
)
def test_results_that_are_none_are_an_error(said: dict[str, Any]) -> None:
    play = Play()
    play.say(**all_at("done") | {"tower": line(r0={"stage": "done", "results": [said]})})
    assert "results" in control._measured(play.stages, result(measured=())).error


def result(**changes: Any) -> CollectiveResult:
    """One that passed, on a gigabit."""
    sizes = (Measured(8, 4e-4, 2e4), Measured(1_000_000, 0.0113, 118e6, 0.002), Measured(64_000_000, 0.73, 117e6, 0.06))
    return replace(CollectiveResult("gloo", healthy.NAMES, 3, sizes), **changes)


def found(outcome: CollectiveResult | None, evidence: Evidence | None = None) -> list[Finding]:
    seen = replace(evidence or wired(), collective=outcome)
    return [finding for check in registry.subject("collective").checks for finding in check.judge(seen)]


def wired(bytes_per_s: float = 117.6e6) -> Evidence:
    evidence = healthy.cpu()
    return replace(evidence, links=tuple(replace(link, throughput_bytes_per_s=bytes_per_s) for link in evidence.links))


def test_nothing_is_found_where_all_is_well_or_nothing_ran() -> None:
    assert found(None) == [] and found(result()) == []
    evidence = replace(wired(), collective=result(left_out=((64_000_000, 73.0),)))
    said = registry.subject("collective").summary(evidence, evidence.cluster.nodes[0], evidence.facts["tower"])
    assert said.startswith("117 MB/s on the bus, 64 MB in 730 ms, 1 MB in 11 ms, 8 bytes in 0.4 ms, 64 MB skipped: it would take 73 s")


STAGE_HINTS = {
    "starting torchrun": "import torch.distributed.run",
    "connecting to the head": "firewall on tower or on this node drops port 29500",
    "importing torch": "import torch",
    "joining": "its own port",
    "1 MB": "ip -s link show dev eth1",
}


@pytest.mark.parametrize(("stage", "hint"), STAGE_HINTS.items())
def test_a_missing_rank_is_named_with_where_to_look(stage: str, hint: str) -> None:
    stack = (
        "Thread 0x00007f1 (most recent call first):", '  File "/x/other.py", line 3 in wait', "",
        "Current thread 0x00007f2 (most recent call first):", '  File "/x/homelab/worker/tools/collective_check.py", line 97 in measure',
    )  # fmt: skip
    missing = RankState(1, "laptop", stage, stack=stack)
    states = (RankState(0, "tower", "64 MB"), missing, RankState(2, "oldtower", "64 MB"))
    (finding,) = found(result(measured=(), error="stood still", missing=(missing,), states=states, seconds=60.2))
    assert (finding.check, finding.node, finding.level) == ("collective.works", "laptop", "fail")
    assert f'rank 1 is missing in the collective test: still at "{stage}" after 60 s' in finding.message
    assert "all others wait for it (at: 64 MB)" in finding.message and "collective_check.py, line 97 in measure" in finding.message
    assert hint in finding.hint


def test_wrong_sums_slow_sums_and_leftovers_are_found() -> None:
    wrong = WrongSum(2, "oldtower", 1_000_000, 3, "element 7 is 12, not 48")
    assert [(one.check, one.node, one.level) for one in found(result(wrong=(wrong,)))] == [("collective.right", "oldtower", "fail")]
    slow = result(measured=(Measured(64_000_000, 2.9, 29e6, 0.1),))
    assert [(one.check, one.node, one.level) for one in found(slow)] == [("collective.speed", "", "warn")]
    assert [(one.check, one.node, one.level) for one in found(result(left=("laptop",)))] == [("collective.ended", "laptop", "warn")]


def test_what_a_processor_holds_up_or_loopback_carries_is_not_called_slow() -> None:
    slow = Measured(64_000_000, 2.9, 29e6, 0.1)
    assert found(result(measured=(replace(slow, cpu_s=1.5),)), wired(2e9)) == []
    (spins,) = found(result(backend="nccl", measured=(replace(slow, cpu_s=5.8),)), wired(2e9))
    assert spins.check == "collective.speed", "with NCCL a processor is always busy: it polls"
    loopback = replace(wired(2e9), lan=dict.fromkeys(healthy.NAMES, ("127.0.0.1", "lo")))
    assert found(result(measured=(slow,)), loopback) == []
    assert found(result(measured=(slow,)), healthy.cpu()) == []  # the wire was not measured


def test_it_is_needed_again_when_something_changed() -> None:
    evidence = healthy.gpu()
    assert judges.needed(evidence)
    kept = CollectiveFacts(fingerprint=judges.fingerprint(evidence))
    tested = replace(evidence, facts={name: facts.model_copy(update={"collective_check": kept}) for name, facts in evidence.facts.items()})
    assert not judges.needed(tested)
    assert (registry.subject("collective").needs(tested) or "").startswith("not run again: it passed on this same cluster")
    assert judges.needed(healthy.packages(tested, "laptop", torch="2.12.0+cu130"))
    assert judges.needed(healthy.card(tested, "laptop", name="NVIDIA GeForce RTX 4090"))
    assert judges.needed(healthy.with_facts(tested, "laptop", gpu={"driver_version": "580.1"}))
    assert judges.needed(replace(tested, lan={**tested.lan, "laptop": ("192.168.1.101", "wlan0")}))
    assert not judges.needed(healthy.packages(tested, "laptop", tensorboard="1.0"))
    assert not judges.needed(healthy.gpu(names=("tower",)))


def two_cards(evidence: Evidence) -> Evidence:
    """The first node has another card like its own."""
    node, facts = evidence.cluster.nodes[0], evidence.facts["tower"]
    cards, devices = [as_json(entry) for entry in facts.gpu.cards] * 2, (facts.gpu.torch or {})["devices"] * 2
    more = healthy.with_facts(evidence, "tower", gpu={"cards": cards, "torch": {**(facts.gpu.torch or {}), "devices": devices}})
    return healthy.with_node(more, "tower", gpus=[card.model_dump() for card in node.gpus] * 2)


def test_one_box_with_two_cards_is_tested_and_one_card_is_not() -> None:
    """Between them P2P or /dev/shm can hang, as a network can."""
    box = two_cards(healthy.gpu(names=("tower",)))
    assert (
        judges.needed(box)
        and judges.wanted(box, (), "when-changed")
        and registry.subject("collective").needs(box) == "not run: homelab preflight --deep runs it"
    )
    alone = replace(box, lan={})
    assert judges.wanted(alone, (), "always"), "it needs no network"
    plan = control._plan(alone)
    assert (plan.world_size, plan.backend, control._request(plan, "tower", "collective-1").ranks) == (2, "nccl", 2)
    one = healthy.gpu(names=("tower",))
    assert not judges.wanted(one, (), "always") and not judges.wanted(
        replace(box, plan=healthy.plan([{"node": "tower", "need_gib": 1}])), (), "always"
    )
    kept = CollectiveFacts(fingerprint=judges.fingerprint(box))
    assert not judges.wanted(healthy.with_facts(box, "tower", collective_check=kept.model_dump()), (), "when-changed")


def test_cards_of_one_box_that_hang_have_their_own_hint() -> None:
    box = two_cards(healthy.gpu(names=("tower",)))
    missing = RankState(1, "tower", "joining")
    hangs = CollectiveResult(
        "nccl", ("tower",), 2, error="stood still", missing=(missing,), states=(RankState(0, "tower", "8 bytes"), missing)
    )
    (finding,) = found(hangs, box)
    assert finding.node == "tower" and "NCCL_P2P_DISABLE" in finding.hint and "/dev/shm" in finding.hint


def test_it_is_not_run_where_it_would_only_hang() -> None:
    assert not judges.blocked(healthy.cpu()) and not judges.blocked(healthy.gpu())
    without_torch = healthy.packages(healthy.cpu(), "laptop", torch=None)
    assert judges.blocked(without_torch) and not judges.blocked(without_torch, skip=("python",))
    assert registry.subject("collective").needs(without_torch) == "not run: fix the failures above first"
    assert registry.subject("collective").needs(healthy.cpu()) == "not run: homelab preflight --deep runs it"
    assert registry.subject("collective").needs(healthy.cpu(names=("tower",))) == "not needed: one process"
    assert registry.subject("collective").needs(replace(healthy.cpu(), collective=result())) is None
    assert judges.blocked(healthy.cut(healthy.cpu(), ("tower", "laptop")))
    for problem in ("Read-only file system", "Permission denied"):
        unwritable = healthy.with_facts(healthy.cpu(), "laptop", resources={"workdir_writable": False, "workdir_problem": problem})
        assert judges.blocked(unwritable) and not judges.wanted(unwritable, (), "always")
    assert not judges.blocked(unwritable, skip=("disk.writable",)) and judges.blocked(unwritable, skip=("disk.readonly",))
    assert not judges.blocked(healthy.with_facts(healthy.cpu(), "laptop", resources={"disk_free_bytes": 10})), (
        "no room for a run is room for a test"
    )


def test_a_launch_that_is_refused_anyway_does_not_wait_for_it() -> None:
    """A missing file, of the recipe and not of the cluster: --deep tests the cluster all the same."""
    full = healthy.with_facts(healthy.cpu(), "laptop", resources={"disk_free_bytes": 10})
    (check,) = {finding.check for finding in registry.judge_all(full, ()) if finding.level == "fail"}
    assert judges.wanted(healthy.cpu(), (), "when-changed")
    assert not judges.wanted(full, (), "when-changed") and judges.wanted(full, (), "always")
    assert judges.wanted(full, (check,), "when-changed"), "who skips the check is not refused"


def test_a_record_that_is_something_else_is_none() -> None:
    assert probe.parse({"fingerprint": "ab", "time": 3, "results": [{"size_bytes": 8}, 4]}) == {
        "fingerprint": "ab", "time": 3, "results": [{"size_bytes": 8}],
    }  # fmt: skip
    assert probe.parse({"fingerprint": 3}) is None and probe.parse([1]) is None and probe.parse(None) is None
    assert probe.parse({"fingerprint": "ab", "time": "x"}) == {"fingerprint": "ab", "time": None, "results": []}


@pytest.mark.parametrize(("seconds", "text"), [(0.0004, "0.4 ms"), (0.0113, "11 ms"), (0.73, "730 ms"), (1.3, "1.30 s")])
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
