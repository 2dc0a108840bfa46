"""The collective smoke test on real nodes: it passes where all is well, and names who is missing where something breaks under it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.collective import judge as judges
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.config.load import load_cluster
from homelab.controller.facts.collective_check import CollectiveResult
from homelab.controller.facts.node import Facts
from homelab.controller.features.preflight import collective_check, collective_state
from homelab.controller.planning.machines import lan_address
from homelab.controller.remote.fanout import Fleet
from homelab.lab import Lab, procfs
from homelab.shared.protocol.collective_messages import CollectiveRequest
from homelab.shared.protocol.collective_stages import SIZES
from scripts.practice.desk import left_on, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture
def fleet(lab: Lab) -> Iterator[Fleet]:
    """Two of the three nodes: a third one costs two more imports of torch and shows nothing else."""
    cluster = load_cluster(lab.cluster_file)
    with Fleet(cluster.model_copy(update={"nodes": cluster.nodes[:2]})) as opened:
        yield opened


@pytest.fixture
def evidence(fleet: Fleet) -> Evidence:
    return look(fleet)


def look(fleet: Fleet) -> Evidence:
    """What the test needs to know of the nodes."""
    answers, errors = fleet.ask("facts", {"peers": [], "port": 29500})
    assert not errors
    facts = {name: Facts.model_validate(answer) for name, answer in answers.items()}
    lan = lan_address.lan_of_all(fleet.cluster, facts)
    return Evidence(cluster=fleet.cluster, head="node1", master_port=29500, facts=facts, lan=lan)


def findings(evidence: Evidence, result: CollectiveResult) -> list[Finding]:
    """What the judges say of it."""
    seen = replace(evidence, collective=result)
    return [finding for check in registry.subject("collective").checks for finding in check.judge(seen)]


def ranks_left(lab: Lab) -> dict[int, str]:
    """What is left of torchrun and its ranks (the agents that ended them are on their way out: `nothing_left` waits for those)."""
    return {pid: words for pid, words in left_on(lab).items() if "HOMELAB_RUN" in procfs.environment(pid)}


class Act:
    """A `say` that does something when the test comes to a stage."""

    def __init__(self, stage: str, what: Callable[[], object]) -> None:
        self.stage, self.what, self.said = stage, what, [""]
        self.at = 0.0

    def __call__(self, text: str) -> None:
        self.said.append(text)
        if self.stage in text and not self.at:
            self.at = time.monotonic()
            self.what()


def workers(lab: Lab, node: str) -> list[int]:
    """The ranks of a node that have begun."""
    return [
        pid
        for pid in lab.processes_of(node)
        if "homelab.worker.tools.collective_check" in procfs.command_line(pid) and "torch.distributed.run" not in procfs.command_line(pid)
    ]


def test_a_healthy_cluster_passes_and_remembers_it(lab: Lab, fleet: Fleet) -> None:
    for node in lab.nodes:  # a launch of another test has kept its own
        (Path(node.workdir) / "collective.json").unlink(missing_ok=True)
    evidence = look(fleet)
    assert judges.needed(evidence)
    said: list[str] = []
    result = collective_check.run(fleet, evidence, said.append)
    assert result.passed and not result.left, result
    assert [one.size_bytes for one in result.measured] == list(SIZES)
    assert all(one.seconds > 0 and one.bus_bytes_per_s > 0 for one in result.measured)
    assert "collective test: importing torch" in said
    assert findings(evidence, result) == []
    assert not ranks_left(lab)
    assert not [file for node in lab.nodes for file in (Path(node.workdir) / "collective").rglob("*")]
    collective_check.keep(fleet, evidence, result)
    after = look(fleet)
    assert not judges.needed(after)
    python = after.facts["node2"].python
    changed = after.facts["node2"].model_copy(
        update={"python": python.model_copy(update={"packages": {**python.packages, "torch": "2.9.0"}})}
    )
    assert judges.needed(replace(after, facts={**after.facts, "node2": changed}))


def test_a_rank_that_dies_ends_it_at_once_with_its_own_words(
    lab: Lab, fleet: Fleet, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Path(lab.state.node("node2").workdir) / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")\n')
    request = collective_check._request

    def with_another_torch(plan: Any, name: str, test: str) -> CollectiveRequest:
        body = request(plan, name, test)
        if name != "node2":
            return body
        return body.replace(environment=body.environment | {"PYTHONPATH": f"{broken.parent}:{body.environment['PYTHONPATH']}"})

    monkeypatch.setattr(collective_check, "_request", with_another_torch)
    result = collective_check.run(fleet, evidence)
    assert result.node == "node2" and "libcudart.so.12" in result.error
    assert result.seconds < 15 and not result.left
    (finding,) = findings(evidence, result)
    assert (finding.check, finding.node, finding.level) == ("collective.works", "node2", "fail")
    assert not ranks_left(lab)


@pytest.mark.thorough
def test_a_node_that_loses_its_power_is_named(lab: Lab, fleet: Fleet, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_state, "SILENT_S", 5.0)
    result = collective_check.run(fleet, evidence, Act("starting torchrun", lambda: lab.fault("node2", "power-cut")))
    assert [state.node for state in result.missing] == ["node2"], result
    assert result.left == ("node2",)
    assert {(finding.check, finding.node) for finding in findings(evidence, result)} == {
        ("collective.works", "node2"),
        ("collective.ended", "node2"),
    }
    assert not ranks_left(lab)


def test_a_pulled_cable_is_named(lab: Lab, fleet: Fleet, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_state, "SILENT_S", 5.0)
    try:
        result = collective_check.run(fleet, evidence, Act("importing torch", lambda: lab.fault("node2", "pull-cable")))
        assert [(state.node, state.is_silent) for state in result.missing] == [("node2", True)], result
        assert result.left == ("node2",)
        (finding,) = [finding for finding in findings(evidence, result) if finding.level == "fail"]
        assert finding.node == "node2" and "stopped answering" in finding.message and "ping" in finding.hint
    finally:
        lab.fault("node2", "plug-cable")
        procfs.send(left_on(lab), signal.SIGKILL)


@pytest.mark.thorough
def test_a_broken_connection_ends_it_everywhere(lab: Lab, fleet: Fleet, evidence: Evidence) -> None:
    def cut() -> None:
        wait_until(lambda: bool(ranks_left(lab)), 10)
        agents = [pid for pid in lab.processes_of("node2") if {"homelab.node", "collective"} <= set(procfs.command_line(pid))]
        process = procfs.read(agents[0])
        assert process is not None
        procfs.send([process.parent], signal.SIGKILL)  # the sshd of this connection

    result = collective_check.run(fleet, evidence, Act("starting torchrun", cut))
    assert result.node == "node2" and "connection" in result.error, result
    assert not result.left
    assert not ranks_left(lab)


def test_ctrl_c_leaves_nothing(lab: Lab, fleet: Fleet, evidence: Evidence) -> None:
    def interrupt() -> None:
        wait_until(lambda: bool(ranks_left(lab)), 10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collective_check.run(fleet, evidence, Act("starting torchrun", interrupt))
    assert not ranks_left(lab)


@pytest.mark.thorough
def test_a_rank_that_stands_still_is_named_with_the_stacks_of_the_others(
    lab: Lab, fleet: Fleet, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()

    def joined(node: str) -> bool:
        files = (Path(lab.state.node(node).workdir) / "collective").glob("*/rank-*.json")
        return any('"joining"' in file.read_text() for file in files)

    def stop() -> None:
        wait_until(lambda: bool(workers(lab, "node2")), 10)
        procfs.send(workers(lab, "node2"), signal.SIGSTOP)
        wait_until(lambda: joined("node1"), 60)
        # the limit is over as soon as that is heard
        monkeypatch.setattr(collective_state, "IMPORT_LIMIT_S", time.monotonic() - started + 1.0)

    result = collective_check.run(fleet, evidence, Act("importing torch", stop))
    assert [(state.node, state.stage) for state in result.missing] == [("node2", "importing torch")], result
    waiting = next(state for state in result.states if state.node == "node1")
    assert waiting.stage == "joining" and "collective_check.py" in judges.innermost(waiting.stack), waiting
    assert not result.left and not ranks_left(lab)
