"""collective: torchrun on all nodes joins, sums up, and sums up right. Judges what `homelab.control.collective` saw."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Literal

from homelab.checks import disk, gpu, network, python, ssh
from homelab.checks.check import Check, Problem, Subject
from homelab.checks.collective_result import (
    CONNECTING,
    IMPORTING,
    JOINING,
    STARTING,
    CollectiveResult,
    RankState,
    seconds_text,
    size_name,
)
from homelab.checks.commands import listed, on_node, path_word
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning.command import quote_words
from homelab.planning.ranks import card_count

SLOW_FACTOR = 3.0
_LEAST_BYTES = 1_000_000  # a sum of 8 bytes is all latency
# A rank that computes for so much of the time is held up by its processor (copies, a quota), not by the wire.
_BUSY = 0.25
# On faster wires than these (1 and 10 Gbit/s) copying and summing in processors is the limit; the cards of a home do not talk faster.
_MOST_BYTES_PER_S = {"gloo": 125e6, "nccl": 1.25e9}
_AGAIN = "homelab preflight --deep"
# It costs ten seconds: with `--deep` always, before a launch when the cluster has changed since it last passed.
When = Literal["always", "when-changed", "never"]


def fingerprint(evidence: Evidence) -> str:
    """sha256 hex of all that a collective depends on: a cluster with the same one need not be tested again.

    The nodes in their order with LAN address, interface, torch, its CUDA and NCCL, driver, cards and environment; and the backend.
    """
    of_recipe = evidence.recipe.environment if evidence.recipe else {}
    nodes = [
        [
            node.name, *evidence.lan.get(node.name, ("", "")), facts.packages.get("torch"), facts.torch_cuda, facts.driver_version,
            [card.uuid or card.name for card in facts.gpus], sorted({**of_recipe, **node.environment}.items()),
        ]
        for node in evidence.cluster.nodes
        if (facts := evidence.facts.get(node.name)) is not None
    ]  # fmt: skip
    return hashlib.sha256(json.dumps([backend(evidence), nodes]).encode()).hexdigest()


def backend(evidence: Evidence) -> str:
    """As the plan chooses it: nccl where any node has a CUDA card, else gloo."""
    return "nccl" if any(card_count(node, evidence.facts) for node in evidence.cluster.nodes) else "gloo"


def rank_total(evidence: Evidence) -> int:
    """Processes that a training here has: those of the plan where there is one, else one per card, and one per node where none has any.

    Two cards of one box talk over PCIe or /dev/shm, which can hang as a network can (nccl-tests issue 117).
    """
    if evidence.plan is not None:
        return evidence.plan.world_size
    return sum(card_count(node, evidence.facts) for node in evidence.cluster.nodes) or len(evidence.cluster.nodes)


def needed(evidence: Evidence) -> bool:
    """True when there is more than one rank, and any node has not kept a test that passed on just this cluster."""
    if rank_total(evidence) < 2:
        return False
    wanted = fingerprint(evidence)
    return any(facts.collective is None or facts.collective.fingerprint != wanted for facts in evidence.facts.values())


def wanted(evidence: Evidence, skip: Collection[str], when: When) -> bool:
    """Whether to run the test now: not where it could only hang (what hinders it is found already), nor where one rank would be alone.

    `skip` holds ids of checks and subjects that were to be ignored; none of ours must be left for it not to be run.
    """
    if when == "never" or rank_total(evidence) < 2 or evidence.refused is not None:
        return False
    if len(evidence.cluster.nodes) > 1 and len(evidence.lan) < 2:
        return False
    if all(check.id in skip or check.subject in skip for check in SUBJECT.checks):
        return False
    return (when == "always" or needed(evidence)) and not blocked(evidence, skip)


def blocked(evidence: Evidence, skip: Collection[str] = ()) -> bool:
    """True when a node is not reached, or its Python, cards, network or workdir have failed already: the test would only hang.

    `skip` holds ids of checks and subjects that were to be ignored.
    """
    if len(evidence.facts) < len(evidence.cluster.nodes):
        return True
    of_subjects = [check for subject in (ssh.SUBJECT, python.SUBJECT, gpu.SUBJECT, network.SUBJECT) for check in subject.checks]
    # The agent keeps the test's logs in the workdir: where it cannot be written, the agent ends, and the node looks as if it were gone.
    return any(
        check.id not in skip and check.subject not in skip and _fails(check, evidence)
        for check in (*of_subjects, *disk.WORKDIR)
    )


def _fails(check: Check, evidence: Evidence) -> bool:
    try:
        return any(finding.level == "fail" for finding in check.judge(evidence))
    except Exception:  # the registry names a check that breaks
        return False


def works(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail for a test that did not come to its end: who was missing, at which stage, and where to look."""
    result = evidence.collective
    if result is None or not result.error:
        return
    of_node: dict[str, list[RankState]] = {}
    for state in result.missing:
        of_node.setdefault(state.node, []).append(state)
    for name, states in of_node.items():
        yield name, Problem("fail", _missing_text(result, states), _where_to_look(evidence, name, states[0]))
    if not of_node:
        yield result.node, Problem("fail", f"the collective test failed: {result.error}", _mend(evidence, result))


def leftovers(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where the test could not be seen to have ended on a node."""
    for name in evidence.collective.left if evidence.collective else ():
        node = evidence.cluster.node(name)
        message = "the collective test may still run here: it could not be asked, or its processes would not end (it ends by itself within 5 minutes)"
        yield name, Problem("warn", message, "look: " + on_node(node, "pgrep -af 'homelab[.]worker[.]smoke'"))


def right(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where a sum came out wrong."""
    for wrong in evidence.collective.wrong if evidence.collective else ():
        message = f"the sum of {size_name(wrong.size_bytes)} over all ranks is wrong on rank {wrong.rank}, in {wrong.count} element{'s' if wrong.count > 1 else ''}: {wrong.first}"
        hint = "training here would go wrong without a word: test this node's memory (memtest86+), its network card and its torch"
        yield wrong.node, Problem("fail", message, hint)


def speed(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where the largest size that was done went three times slower than the slowest wire of the ring carries, or a larger one was
    left out because it would have taken too long; where a processor was the limit: nothing."""
    result = evidence.collective
    measured = max(result.measured, key=lambda one: one.size_bytes, default=None) if result else None
    wire = _slowest_wire(evidence, result) if result else None
    if result is None or measured is None or wire is None or measured.size_bytes < _LEAST_BYTES:
        return
    # NCCL polls in a thread of its own, and the one that waits for the card spins: with it a processor is always busy.
    if result.backend == "gloo" and measured.cpu_s > _BUSY * measured.seconds:
        return
    (source, target), wire_bytes_per_s = wire
    is_slower = measured.bus_bytes_per_s * SLOW_FACTOR < min(wire_bytes_per_s, _MOST_BYTES_PER_S[result.backend])
    if is_slower or result.left_out:
        message = (
            f"summing {size_name(measured.size_bytes)} over all ranks moved {_speed(measured.bus_bytes_per_s)} on every wire, and the "
            f"slowest one, {source} to {target}, carries {_speed(wire_bytes_per_s)}"
        )
        message += "".join(f"; {size_name(size)} would take {seconds:.0f} s" for size, seconds in result.left_out)
        hint = f"does something else use the network or the cards? Once more: {_AGAIN}; which interface: homelab plan RECIPE --why"
        yield "", Problem("warn", message, hint)


def _slowest_wire(evidence: Evidence, result: CollectiveResult) -> tuple[tuple[str, str], float] | None:
    """Of the pairs that are neighbours in the ring, as the dials measured them; None when not all are known, or on loopback."""
    names = result.nodes
    if len(names) < 2 or any(evidence.lan.get(name, ("127.", "lo"))[0].startswith("127.") for name in names):
        return None
    pairs = {(name, names[(place + 1) % len(names)]) for place, name in enumerate(names)}
    pairs |= {(target, source) for source, target in pairs}
    speeds = {pair: evidence.throughputs.get(pair) for pair in sorted(pairs)}
    known = {pair: value for pair, value in speeds.items() if value is not None}
    return min(known.items(), key=lambda item: item[1]) if len(known) == len(pairs) else None


def _missing_text(result: CollectiveResult, states: list[RankState]) -> str:
    numbers = [str(state.rank) for state in states]
    which = f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
    verb = "are" if len(numbers) > 1 else "is"
    if states[0].is_silent:
        doing = f"the node stopped answering in the middle of the collective test ({which} {'were' if len(numbers) > 1 else 'was'} at: {states[0].stage})"
    else:
        others = sorted(
            {state.stage for state in result.states if state.rank not in {one.rank for one in result.missing}}
        )
        waiting = (
            f", and all others wait for {'them' if len(numbers) > 1 else 'it'} (at: {listed(others)})" if others else ""
        )
        doing = f'{which} {verb} missing in the collective test: still at "{states[0].stage}" after {result.seconds:.0f} s{waiting}'
    frame = innermost(states[0].stack)
    return f"{doing}; it stands in {frame}" if frame else doing


def innermost(stack: Collection[str]) -> str:
    """'smoke.py, line 97 in measure': the innermost frame of the thread that the signal met (faulthandler: most recent call first)."""
    lines = list(stack)
    starts = [place for place, line in enumerate(lines) if line.startswith("Current thread")]
    for line in lines[starts[-1] + 1 :] if starts else lines:
        if line.strip().startswith("File "):
            file, _, rest = line.strip()[6:].partition('", ')
            return f"{file.rpartition('/')[2]}, {rest}"
    return ""


def _mend(evidence: Evidence, result: CollectiveResult) -> str:
    """For an error in a node's own words, or one that is nobody's alone."""
    states = [state for state in result.states if state.node == result.node]
    if states and states[0].stage in (STARTING, IMPORTING):
        return _where_to_look(evidence, result.node, states[0])
    if result.node:
        return f"mend that, then once more: {_AGAIN}; all that is known of this node: {quote_words(['homelab', 'doctor', result.node])}"
    return f"homelab preflight --only network, then once more: {_AGAIN}"


def _where_to_look(evidence: Evidence, name: str, state: RankState) -> str:
    node, stage = evidence.cluster.node(name), state.stage
    if state.is_silent:
        return f"is its cable in, is it awake? {quote_words(['ping', '-c', '3', node.host]) if node.host != 'local' else 'uptime'}; then: {_AGAIN}"
    if stage in (STARTING, IMPORTING):
        module = "torch.distributed.run" if stage == STARTING else "torch"
        command = f"time {path_word(node.python)} -c {quote_words([f'import {module}'])}"
        return f"see whether and how fast it starts: {on_node(node, command)}"
    if stage == CONNECTING:
        return (
            f"a firewall on {evidence.head} or here drops port {evidence.master_port}: homelab preflight --only network"
        )
    if evidence.collective is not None and len(evidence.collective.nodes) == 1:
        p2p = 'environment = { NCCL_P2P_DISABLE = "1" }'
        return f"cards of one machine talk over PCIe or /dev/shm: {on_node(node, 'df -h /dev/shm')}; in cluster.toml, node {name}: {p2p}; then: {_AGAIN}"
    if stage == JOINING:
        return "ranks connect to each other on ports of their own: a firewall on either side, or the wrong interface? homelab preflight --only network"
    interface = evidence.lan.get(name, ("", ""))[1]
    look = on_node(node, quote_words(["ip", "-s", "link", "show", "dev", interface]) if interface else "ip -s link")
    return f"small messages pass and this one does not: a bad cable, another MTU? {look}"


def _needs(evidence: Evidence) -> str | None:
    if evidence.collective is not None:
        return None
    if rank_total(evidence) < 2:
        return "not needed: one process"
    if blocked(evidence):
        return "not run: mend the failures above first"
    return (
        "not run: --deep runs it"
        if needed(evidence)
        else "not run again: it passed on just this cluster (--deep runs it)"
    )


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    result = evidence.collective
    assert result is not None
    if node.name not in result.nodes:
        return f"takes no part ({result.backend})"
    if result.error:
        return "waited for the others"
    last = result.measured[-1] if result.measured else None
    parts = (
        [f"{_speed(last.bus_bytes_per_s)} on the bus"]
        if last is not None and last.size_bytes > 8 and result.ranks > 1
        else []
    )
    parts += [f"{size_name(one.size_bytes)} in {seconds_text(one.seconds)}" for one in reversed(result.measured)]
    parts += [f"{size_name(size)} left out: it would take {seconds:.0f} s" for size, seconds in result.left_out]
    return ", ".join([*parts, f"{result.ranks} ranks", result.backend])


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s >= 9.95e6 else f"{bytes_per_s / 1e6:.1f} MB/s"


SUBJECT = Subject(
    "collective",
    "torchrun works across all nodes",
    (
        Check(
            "collective.works",
            "torchrun's ranks on all nodes find each other and sum up",
            "fail",
            "collective",
            of_cluster=works,
        ),
        Check("collective.right", "what the ranks sum up is right to the last element", "fail", "collective", of_cluster=right),
        Check("collective.speed", "summing up is about as fast as the wire", "warn", "collective", of_cluster=speed),
        Check("collective.ended", "nothing of the collective test is left running", "warn", "collective", of_cluster=leftovers),
    ),
    _summary,
    _needs,
)
