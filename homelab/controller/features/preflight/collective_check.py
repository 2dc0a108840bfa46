"""The collective smoke test of a cluster: started on all nodes, watched, judged by `homelab.controller.features.preflight.collective_state`, and ended everywhere."""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from homelab.controller.attempt import planner, short_job
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.checks.collective import judge as judges
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.facts.collective_check import CollectiveResult, Measured, RankState, WrongSum
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight.collective_state import CollectiveOutcome, CollectiveTestState
from homelab.controller.planning.types import Plan
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.remote.session import Stream
from homelab.controller.run import signals
from homelab.shared.protocol.collective_messages import CollectiveLine, CollectiveLook, CollectiveRequest, JobRequest, KeepRequest

PROGRAM = ("-m", "homelab.worker.tools.collective_check")
_AGENT_LIMIT_S = 280.0  # more than any limit here: an agent without a listener ends its part by itself
_GROUP_LIMIT_S = 75  # more than the limit here: ranks that hang are to be asked where before they give up
_LAST_WORDS_S = 5.0


def run(fleet: Fleet, evidence: Evidence, say: Say = lambda text: None) -> CollectiveResult:
    """Run the test on the nodes of the plan. Raises nothing for a node that fails: that is the result. Ctrl-C ends it everywhere.

    The nodes must have answered for their facts. Raises InputError where no plan can be made (no place on the LAN).
    """
    plan = _plan(evidence)
    name = f"collective-{secrets.token_hex(4)}"
    names = [node.name for node in plan.nodes]
    result = CollectiveResult(plan.backend, tuple(names), plan.world_size)
    ranks = {node: tuple(rank.rank for rank in plan.ranks if rank.node == node) for node in names}
    started = time.monotonic()
    streams: dict[str, Stream] = {}
    clean: set[str] = set()
    try:
        with signals.held():
            streams, errors = on_all(names, lambda node: fleet.agent(node).open("collective", _request(plan, node, name)))
        if errors:
            node, error = next(iter(errors.items()))
            result = replace(result, error=error.message, node=node)
        else:
            result, clean = _watch(fleet, streams, result, name, ranks, say)
    finally:
        with signals.held():
            on_all(streams, lambda node: streams[node].close())
            silent = {state.node for state in result.missing if state.is_silent and not result.node}
            left = short_job.end(fleet, name, [node for node in names if node not in clean], silent)
    return replace(result, left=tuple(left), seconds=time.monotonic() - started)


def keep(fleet: Fleet, evidence: Evidence, result: CollectiveResult) -> None:
    """Have every node remember a test that passed on this cluster (`checks.collective.needed`). What cannot be kept is tested again."""
    if result.passed:
        record = {"fingerprint": judges.fingerprint(evidence), "time": time.time(), "results": result.results()}
        fleet.ask("collective-keep", KeepRequest(record=record), names=list(evidence.facts))


def _plan(evidence: Evidence) -> Plan:
    """The plan of the launch where there is one; else that of a script, which has the same nodes, addresses and environment."""
    if evidence.plan is not None:
        return evidence.plan
    cluster = evidence.cluster.only(tuple(evidence.facts))
    script = parse_recipe({"script": {"path": "smoke.py"}})
    return planner.planned(replace(planner.inputs_of(cluster, evidence.facts, script, [], "collective"), port=evidence.master_port))


def _request(plan: Plan, name: str, test: str) -> CollectiveRequest:
    """What a node is told: the launch's own environment without the run in it."""
    body = short_job.request(plan, name, test, [*PROGRAM, plan.backend])
    environment = {key: value for key, value in body.environment.items() if key not in ("HOMELAB_RUN_DIR", "HOMELAB_ATTEMPT")}
    if plan.backend == "nccl":
        environment["NCCL_DEBUG_FILE"] = "nccl-%h-%p.log"  # in the folder of the test, which is where its ranks stand
    return body.replace(environment=environment | {"HOMELAB_DDP_TIMEOUT_S": str(_GROUP_LIMIT_S)}, limit_s=_AGENT_LIMIT_S)


def _watch(
    fleet: Fleet, streams: Mapping[str, Stream], result: CollectiveResult, test: str, ranks: Mapping[str, tuple[int, ...]], say: Say
) -> tuple[CollectiveResult, set[str]]:
    """Listen until it is over: what came of it, and the nodes that have said themselves that nothing is left."""
    stages = CollectiveTestState(ranks, time.monotonic())
    with short_job.listening(streams) as lines:
        last_progress, outcome = "", None
        while outcome is None:
            _hear(stages, lines, 0.1)
            now = time.monotonic()
            outcome = stages.outcome(now)
            progress = stages.progress(now)
            if progress != last_progress and outcome is None:
                say(progress)
                last_progress = progress
        if outcome.kind == "done":
            deadline = time.monotonic() + _LAST_WORDS_S
            while set(stages.ended) | stages.lost < set(streams) and time.monotonic() < deadline:
                _hear(stages, lines, 0.1)
            result = _measured(stages, result)
        else:
            result = _given_up(fleet, stages, outcome, result, test, say)
    clean = {name for name, line in stages.ended.items() if line.ended is not None and not line.ended.left}
    return result, clean


def _hear(stages: CollectiveTestState, lines: queue.Queue[short_job.NodeLine], timeout_s: float) -> None:
    """Take in all lines that are there; wait so long for the first."""
    with contextlib.suppress(queue.Empty):
        while True:
            _take(stages, *lines.get(timeout=timeout_s))
            timeout_s = 0.001


def _take(stages: CollectiveTestState, name: str, line: bytes | None) -> None:
    now = time.monotonic()
    if line is None:
        if name not in stages.ended and name not in stages.lost:
            stages.lose(name, "the connection to this node broke in the middle of the test", now)
        return
    if name in stages.lost:
        return
    try:
        answer = decoded(line)
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            stages.lose(name, plain_lines(str(answer["error"].get("message"))), now)
        else:
            stages.hear(name, read(CollectiveLine, answer), now)
    except (ValueError, ValidationError):
        stages.lose(name, "it answered with something that homelab's agent never sends", now)


def _measured(stages: CollectiveTestState, result: CollectiveResult) -> CollectiveResult:
    """The result of a test that came to its end, from what the ranks have written down. Seconds are the same on all of them."""
    measured: list[Measured] = []
    left_out: list[tuple[int, float]] = []
    wrong: list[WrongSum] = []
    try:
        for state in stages.states(time.monotonic()):
            results = stages.results(state.rank)
            for entry in results:
                size = int(entry["size_bytes"])
                if entry.get("wrong"):
                    first = plain_lines(str(entry.get("first_wrong")))[:200]
                    wrong.append(WrongSum(state.rank, state.node, size, int(entry["wrong"]), first))
                if state.rank == 0 and "predicted_s" in entry:
                    left_out.append((size, _number(entry["predicted_s"])))
                elif state.rank == 0:
                    numbers = (_number(entry[key]) for key in ("seconds", "bus_bytes_per_s", "cpu_s"))
                    measured.append(Measured(size, *numbers))
    except (KeyError, TypeError, ValueError, OverflowError):
        return replace(result, error="a rank wrote results in a form that homelab never writes")
    return replace(result, measured=tuple(measured), left_out=tuple(left_out), wrong=tuple(wrong))


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _given_up(
    fleet: Fleet, stages: CollectiveTestState, outcome: CollectiveOutcome, result: CollectiveResult, test: str, say: Say
) -> CollectiveResult:
    """The result of a test that was not to come to its end: who is missing, and what everybody is doing."""
    now = time.monotonic()
    states = stages.states(now)
    stacks: dict[int, tuple[str, ...]] = {}
    if outcome.kind == "stuck":
        names = [name for name in result.nodes if not stages.is_silent(name, now) and name not in stages.lost]
        say("collective test: asking every node what it is doing")
        answers, _ = fleet.ask("collective-look", JobRequest(name=test), names=names, timeout_s=short_job.ASK_S)
        for name, answer in answers.items():
            node_look = read(CollectiveLook, answer)
            # for ranks that have not begun: the log of torchrun
            stacks |= {state.rank: node_look.log for state in states if state.node == name}
            stacks |= {rank: entry.stack for rank, entry in node_look.ranks.items()}

    def with_stack(state: RankState) -> RankState:
        return replace(state, stack=tuple(map(plain_lines, stacks.get(state.rank, ()))))

    return replace(
        result, error=plain_lines(outcome.error), node=outcome.node, missing=tuple(map(with_stack, outcome.missing)),
        states=tuple(map(with_stack, states)),
    )  # fmt: skip
