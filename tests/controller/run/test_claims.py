"""Two at once: of two launches or recoveries one goes on and the other says who does, and a stop by hand is lost by neither.

The nodes are real agents, asked in this process, each with a workdir of its own.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import start
from homelab.controller.base import elapsed
from homelab.controller.base.errors import HomelabError, StoppedError, SupersededError, TakenError, UnreachableError
from homelab.controller.features.launch import start_run
from homelab.controller.run import claims, process_owner, store
from homelab.controller.run.claims import Claim
from homelab.controller.run.paths import RunPaths
from homelab.node.system import processes
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
RUN, OTHER = "2026-01-01-0000-law", "2026-01-01-0000-mid"
NAMES = ["node1", "node2", "node3"]


class Nodes(FakeFleet):
    """Three nodes, on which programs of a run may be alive."""

    def alive(self, run: str = RUN) -> list[str]:
        return [name for name, node in self.nodes.items() if processes.of_run(run, str(node.workdir), name)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, NAMES)
    yield made
    for name, node in made.nodes.items():
        for run in (RUN, OTHER):
            processes.signal_all(processes.of_run(run, str(node.workdir), name), signal.SIGKILL)


def claimed(nodes: Nodes, run: str = RUN, doing: str = "launched", names: list[str] = NAMES, **more: Any) -> Any:
    return claims.claimed(nodes, run, names, doing, **more)


def begin(nodes: Nodes, claim: Claim, attempt: int = 1, run: str = RUN, **more: Any) -> None:
    """Start programs that sleep, in place of torchrun."""
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    parts = [
        builders.node_plan(number, name, workdir=str(node.workdir), command=command)
        for number, (name, node) in enumerate(nodes.nodes.items())
    ]
    ranks = [builders.rank_plan(part.node_rank, part.name) for part in parts]
    plan = builders.plan(ranks, run=run, attempt=attempt, nodes=tuple(parts), **more)
    start.start(nodes, claim, plan, builders.script_recipe(), {"name": run, "data": {}}, [], lambda text: None)


def test_a_programs_checkpoint_is_unpacked_on_all_nodes_before_any_start(nodes: Nodes) -> None:
    """Torchrun would wait on one node while another one unpacks, and a start may not take so long."""
    with claimed(nodes) as claim:
        begin(nodes, claim, resume_step=10)
    verbs = [verb for _, verb in nodes.asked if verb in ("unpack-checkpoint", "start")]
    assert verbs == ["unpack-checkpoint"] * 3 + ["start"] * 3
    assert {request["timeout_s"] for node in nodes.nodes.values() for request in node.requests if request["verb"] == verbs[0]} == {1800.0}
    nodes.nodes["node2"].answers["unpack-checkpoint"] = HomelabError("damaged", where="node2", hint="look")
    with pytest.raises(HomelabError, match="damaged"), claimed(nodes, OTHER) as claim:
        begin(nodes, claim, run=OTHER, resume_step=10)
    assert nodes.alive(OTHER) == []


def test_of_two_launches_at_once_one_has_all_nodes_and_the_other_stops_nothing(nodes: Nodes) -> None:
    gate = threading.Barrier(2)
    outcomes: list[tuple[str, TakenError | None]] = []

    def one(run: str) -> None:
        gate.wait()
        try:
            with claimed(nodes, run, is_launch=True) as claim:
                begin(nodes, claim, run=run)
                outcomes.append((run, None))
        except TakenError as error:
            outcomes.append((run, error))

    for names in ((RUN, RUN), (RUN, OTHER)):  # two controllers with one name; one desk, whose second launch has the next name
        outcomes.clear()
        threads = [threading.Thread(target=one, args=(run,)) for run in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        lost = [error for _, error in outcomes if error]
        winner = next(run for run, error in outcomes if error is None)
        assert len(lost) == 1 and nodes.alive(winner) == NAMES
        assert winner in str(lost[0]) and "homelab" in lost[0].hint
        for name, node in nodes.nodes.items():
            nodes.agent(name).ask("stop", {"run": winner, "grace_s": 0.2})
            shutil.rmtree(node.workdir / "runs")
            (node.workdir / "claims" / ".started").unlink()


def test_a_second_recovery_is_told_who_recovers_and_ends_nothing(nodes: Nodes) -> None:
    with claimed(nodes) as claim:
        begin(nodes, claim)
    with claimed(nodes, doing="recovered by hand") as first:
        with pytest.raises(TakenError, match="being recovered by hand already") as caught, claimed(nodes, doing="recovered by hand"):
            pass
        assert process_owner.name() in caught.value.where and f"homelab stop {RUN}" in caught.value.hint
        assert nodes.alive() == NAMES
        assert first.known() == 1
        start.stop_all(nodes, RUN, NAMES, first.as_request(), grace_s=0.2)
        assert nodes.alive() == []
        begin(nodes, first, attempt=2)
    with claimed(nodes, doing="recovered by hand") as late:
        late.after, late.newest = 1, {}  # it had looked before the first one was done
        with pytest.raises(SupersededError):
            start.stop_all(nodes, RUN, NAMES, late.as_request(), grace_s=0.2)
        assert nodes.alive() == NAMES
    with pytest.raises(SupersededError), claimed(nodes, doing="recovered by its supervisor", after=1):
        pass
    assert nodes.alive() == NAMES


def test_a_stop_while_it_ships_or_looks_is_not_lost(nodes: Nodes) -> None:
    with claimed(nodes, is_launch=True) as claim:
        stopped, _ = start.stop_all(nodes, RUN, NAMES, start.BY_HAND, grace_s=0.2)
        assert {answer["asked"] for answer in stopped.values()} == {0}
        with pytest.raises(StoppedError):
            begin(nodes, claim)
    assert nodes.alive() == []
    with pytest.raises(StoppedError), claimed(nodes, doing="recovered by hand", age_s=lambda: 60.0):
        pass  # typed before the stop, at its claim behind it
    with claimed(nodes, doing="recovered by hand", age_s=lambda: 0.0) as claim:
        begin(nodes, claim)
    assert nodes.alive() == NAMES


def test_a_start_that_one_node_refuses_is_undone_and_what_others_have_started_is_left(nodes: Nodes) -> None:
    with claimed(nodes) as claim:
        nodes.agent("node2").ask("stop", {"run": RUN, "grace_s": 0.2, **start.BY_HAND})  # it came as the start was on its way
        with pytest.raises(StoppedError):
            begin(nodes, claim)
        assert nodes.alive() == []
    with claimed(nodes, OTHER) as claim:
        begin(nodes, claim, run=OTHER)
    with claimed(nodes, OTHER) as late, pytest.raises(TakenError, match="was started on this node already"):
        begin(nodes, late, run=OTHER)
    assert nodes.alive(OTHER) == NAMES


def test_who_was_killed_keeps_nobody_out(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = process_owner.mark() | {"born": 1}
    with monkeypatch.context() as then:
        then.setattr(process_owner, "mark", lambda: dead)
        Claim(nodes, RUN, "launched", process_owner.age_s, is_launch=True).take(NAMES, strictly=True)
    with claimed(nodes, OTHER, is_launch=True) as claim:
        begin(nodes, claim, run=OTHER)
    elsewhere = process_owner.mark() | {"boot_id": "another machine"}
    with monkeypatch.context() as then:
        then.setattr(process_owner, "mark", lambda: elsewhere)
        Claim(nodes, RUN, "launched", process_owner.age_s).take(NAMES, strictly=True)
    with pytest.raises(TakenError), claimed(nodes, RUN):
        pass


def test_what_happened_while_this_machine_slept_is_younger_than_a_try_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person stopped the run elsewhere in an hour in which the supervisor's laptop was closed: the node counts that hour."""
    now_s = 1000.0
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: now_s if clock == getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) else 5.0
    )
    age_s = claims.since(elapsed.now_s())
    now_s += 3600.0
    assert age_s() == 3600.0


def test_a_claim_that_its_node_did_not_hear_given_up_is_taken_over_by_the_same_process(nodes: Nodes) -> None:
    """A node that is cut off while it is claimed comes back with the claim of the first try: the second one would wait five minutes for itself."""
    with claimed(nodes):
        nodes.nodes["node1"].is_off = True
    nodes.nodes["node1"].is_off = False
    nodes._agents.clear()
    with claimed(nodes) as claim:
        assert set(claim.newest) == {*NAMES}
        with pytest.raises(TakenError), claimed(nodes):
            pass


def test_a_node_that_is_off_keeps_nobody_from_recovering_and_is_asked_when_it_is_back(nodes: Nodes) -> None:
    nodes.nodes["node1"].is_off = True
    with claimed(nodes, doing="recovered by hand") as claim:
        assert set(claim.newest) == {"node2", "node3"}
        with pytest.raises(TakenError), claimed(nodes, doing="recovered by hand"):
            pass
        with pytest.raises(UnreachableError):
            begin(nodes, claim)
        assert nodes.alive() == []
        nodes.nodes["node1"].is_off = False
        begin(nodes, claim)
        assert nodes.alive() == NAMES


def test_a_launch_looks_at_the_intent_right_before_its_start_and_stays_stopped(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path / RUN), builders.plan(run=RUN)
    store.set_state(paths, "shipping", 1)
    start_run._refuse_stopped(paths, plan)
    store.set_state(paths, "stopping", 1, intent="stopping")
    with pytest.raises(StoppedError) as caught, start_run._failure_written_down(paths, plan):
        start_run._refuse_stopped(paths, plan)
    assert RUN in caught.value.hint
    assert (store.read_object(paths.state_json)["state"], store.intent_of(paths, 1)) == ("stopped", "stopped")
