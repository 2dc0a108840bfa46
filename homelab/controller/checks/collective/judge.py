"""collective: torchrun on all nodes joins, sums up, and sums up right. Judges what `homelab.controller.features.preflight.collective_check` saw."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Literal

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import listed, megabytes
from homelab.controller.checks.check import Check, Problem, check, subject
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.collective_check import CollectiveResult, RankState, seconds_text, size_name
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import on_node, path_word
from homelab.controller.planning.machines.machines import card_count, device_of
from homelab.shared.protocol.collective_stages import CONNECTING, IMPORTING, JOINING, STARTING

SLOW_FACTOR = 3.0
_LEAST_BYTES = 1_000_000  # a sum of 8 bytes is all latency
# A rank that computes for so much of the time is held up by its processor (copies, a quota), not by the wire.
_BUSY = 0.25
# On faster wires than these (1 and 10 Gbit/s) copying and summing in processors is the limit; the cards of a home do not talk faster.
_MOST_BYTES_PER_S = {"gloo": 125e6, "nccl": 1.25e9}
_AGAIN = homelab("preflight --deep")
_NETWORK = homelab("preflight --only network")
# Where these fail, the test would only hang. Its logs lie in the workdir: where that cannot be written, the node looks as if it were gone.
_HINDERING = frozenset({"ssh", "python", "gpu", "network", "disk.writable", "disk.readonly"})
# It costs ten seconds: with `--deep` always, before a launch when the cluster has changed since it last passed.
When = Literal["always", "when-changed", "never"]


def fingerprint(evidence: Evidence) -> str:
    """sha256 hex of all that a collective depends on: a cluster with the same one need not be tested again.

    The nodes in their order with LAN address, interface, torch, its CUDA and NCCL, driver, cards and environment; and the backend.
    """
    of_recipe = evidence.recipe.environment if evidence.recipe else {}
    nodes = [
        [
            node.name, *evidence.lan.get(node.name, ("", "")), facts.python.packages.get("torch"), facts.python.torch_cuda, facts.gpu.driver_version,
            [card.uuid or card.name for card in facts.gpu.cards], sorted({**of_recipe, **node.environment}.items()),
        ]
        for node in evidence.cluster.nodes
        if (facts := evidence.facts.get(node.name)) is not None
    ]  # fmt: skip
    return hashlib.sha256(json.dumps([backend(evidence), nodes]).encode()).hexdigest()


def backend(evidence: Evidence) -> str:
    """As the plan chooses it: nccl where any node has a CUDA card, else gloo."""
    return "nccl" if device_of(evidence.cluster, evidence.facts) == "cuda" else "gloo"


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
    current = fingerprint(evidence)
    return any(facts.collective_check is None or facts.collective_check.fingerprint != current for facts in evidence.facts.values())


def wanted(evidence: Evidence, skip: Collection[str], when: When) -> bool:
    """Whether to run the test now: not where it could only hang (what hinders it is found already), nor where one rank would be alone.

    A launch is refused where any check has failed ("when-changed"): a person need not wait for the test to hear of it.
    `skip` holds ids of checks and subjects that were to be ignored; none of ours must be left for it not to be run.
    """
    if when == "never" or rank_total(evidence) < 2 or evidence.refused is not None:
        return False
    if len(evidence.cluster.nodes) > 1 and len(evidence.lan) < 2:
        return False
    from homelab.controller.checks import registry

    if all(check.is_among(skip) for check in registry.subject("collective").checks):
        return False
    if blocked(evidence, skip):
        return False
    return when == "always" or (needed(evidence) and not any(finding.keeps_out for finding in registry.judge_all(evidence, skip)))


def blocked(evidence: Evidence, skip: Collection[str] = ()) -> bool:
    """True when a node is not reached, or its Python, cards, network or workdir have failed already: the test would only hang.

    So it is where another training has the cards: the test would slow it down.

    `skip` holds ids of checks and subjects that were to be ignored.
    """
    if len(evidence.facts) < len(evidence.cluster.nodes):
        return True
    from homelab.controller.checks import registry

    return any(check.is_among(_HINDERING) and not check.is_among(skip) and _fails(check, evidence) for check in registry.CHECKS)


def _fails(check: Check, evidence: Evidence) -> bool:
    try:
        return any(finding.keeps_out for finding in check.judge(evidence))
    except Exception:  # noqa: BLE001 - the registry names a check that breaks
        return False


@check("collective.works", "torchrun's ranks on all nodes find each other and sum up", worst="fail", sees="collective")
def works(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail for a test that did not finish: which rank was missing, at which stage, and where to look."""
    result = evidence.collective
    if result is None or not result.error:
        return
    of_node: dict[str, list[RankState]] = {}
    for state in result.missing:
        of_node.setdefault(state.node, []).append(state)
    for name, states in of_node.items():
        yield name, Problem("fail", _missing_text(result, states), _where_to_look(evidence, name, states[0]))
    if not of_node:
        yield result.node, Problem("fail", f"the collective test failed: {result.error}", _fix(evidence, result))


@check("collective.ended", "no process of the collective test is left", worst="warn", sees="collective", after="collective.speed")
def leftovers(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where the test could not be seen to have ended on a node."""
    for name in evidence.collective.left if evidence.collective else ():
        node = evidence.cluster.node(name)
        message = "the collective test may still run here: the node did not answer, or its processes did not end (they end by themselves within 5 minutes)"
        yield name, Problem("warn", message, "look: " + on_node(node, "pgrep -af 'homelab[.]worker[.]tools[.]collective_check'"))


@check("collective.right", "the sum over all ranks is right to the last element", worst="fail", sees="collective", after="collective.works")
def right(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where a sum came out wrong."""
    for wrong in evidence.collective.wrong if evidence.collective else ():
        message = f"the sum of {size_name(wrong.size_bytes)} over all ranks is wrong on rank {wrong.rank}, in {wrong.count} element{'s' if wrong.count > 1 else ''}: {wrong.first}"
        hint = "a training here would be wrong without an error: test this node's memory (memtest86+), its network card and its torch"
        yield wrong.node, Problem("fail", message, hint)


@check("collective.speed", "an all-reduce is about as fast as the network", worst="warn", sees="collective")
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
        hint = Hint(
            "does another program use the network or the cards? Test again: {}; which interface: {}", _AGAIN, homelab("plan RECIPE --why")
        )
        yield "", Problem("warn", message, hint)


def _slowest_wire(evidence: Evidence, result: CollectiveResult) -> tuple[tuple[str, str], float] | None:
    """Of the pairs that are neighbours in the ring, as the dials measured them; None when not all are known, or on loopback."""
    names = result.nodes
    if len(names) < 2 or any(evidence.lan.get(name, ("127.", "lo"))[0].startswith("127.") for name in names):
        return None
    pairs = {(name, names[(place + 1) % len(names)]) for place, name in enumerate(names)}
    pairs |= {(target, source) for source, target in pairs}
    speeds = {pair: evidence.throughputs.get(pair) for pair in sorted(pairs)}
    measured = {pair: value for pair, value in speeds.items() if value is not None}
    return min(measured.items(), key=lambda item: item[1]) if len(measured) == len(pairs) else None


def _missing_text(result: CollectiveResult, states: list[RankState]) -> str:
    numbers = [str(state.rank) for state in states]
    ranks = f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
    verb = "are" if len(numbers) > 1 else "is"
    if states[0].is_silent:
        doing = f"the node stopped answering in the middle of the collective test ({ranks} {'were' if len(numbers) > 1 else 'was'} at: {states[0].stage})"
    else:
        others = sorted({state.stage for state in result.states if state.rank not in {one.rank for one in result.missing}})
        waiting = f", and all others wait for {'them' if len(numbers) > 1 else 'it'} (at: {listed(others)})" if others else ""
        doing = f'{ranks} {verb} missing in the collective test: still at "{states[0].stage}" after {result.seconds:.0f} s{waiting}'
    frame = innermost(states[0].stack)
    return f"{doing}; it is in {frame}" if frame else doing


def innermost(stack: Collection[str]) -> str:
    """'collective_check.py, line 97 in measure': the innermost frame of the thread that the signal met (faulthandler: most recent call first)."""
    lines = list(stack)
    starts = [place for place, line in enumerate(lines) if line.startswith("Current thread")]
    for line in lines[starts[-1] + 1 :] if starts else lines:
        if line.strip().startswith("File "):
            file, _, rest = line.strip()[6:].partition('", ')
            return f"{file.rpartition('/')[2]}, {rest}"
    return ""


def _fix(evidence: Evidence, result: CollectiveResult) -> str:
    """For an error in a node's own words, or one that is nobody's alone."""
    states = [state for state in result.states if state.node == result.node]
    if states and states[0].stage in (STARTING, IMPORTING):
        return _where_to_look(evidence, result.node, states[0])
    if result.node:
        return Hint("fix that, then test again: {}; all facts of this node: {}", _AGAIN, homelab("doctor", result.node))
    return Hint("{}, then once more: {}", _NETWORK, _AGAIN)


def _where_to_look(evidence: Evidence, name: str, state: RankState) -> str:
    node, stage = evidence.cluster.node(name), state.stage
    if state.is_silent:
        probe = quote_words(["ping", "-c", "3", node.host]) if node.host != "local" else "uptime"
        return Hint("is its cable plugged in, and is it awake? {}; then: {}", probe, _AGAIN)
    if stage in (STARTING, IMPORTING):
        module = "torch.distributed.run" if stage == STARTING else "torch"
        command = f"time {path_word(node.python)} -c {quote_words([f'import {module}'])}"
        return f"test whether it starts, and how fast: {on_node(node, command)}"
    if stage == CONNECTING:
        return Hint("a firewall on {} or on this node drops port {}: {}", evidence.head, evidence.master_port, _NETWORK)
    if evidence.collective is not None and len(evidence.collective.nodes) == 1:
        p2p = 'environment = { NCCL_P2P_DISABLE = "1" }'
        hint = "cards of one machine talk over PCIe or /dev/shm: {}; in cluster.toml, node {}: {}; then: {}"
        return Hint(hint, on_node(node, "df -h /dev/shm"), name, p2p, _AGAIN)
    if stage == JOINING:
        return Hint("each rank listens on its own port: is there a firewall on either side, or is the interface wrong? {}", _NETWORK)
    interface = evidence.lan.get(name, ("", ""))[1]
    probe = on_node(node, quote_words(["ip", "-s", "link", "show", "dev", interface]) if interface else "ip -s link")
    return f"small messages pass, and this one does not: is a cable bad, or does the MTU differ? {probe}"


def _needs(evidence: Evidence) -> str | None:
    if evidence.collective is not None:
        return None
    if rank_total(evidence) < 2:
        return "not needed: one process"
    if blocked(evidence):
        return "not run: fix the failures above first"
    return (
        "not run: homelab preflight --deep runs it"
        if needed(evidence)
        else "not run again: it passed on this same cluster (homelab preflight --deep runs it)"
    )


@subject("collective", "torchrun works across all nodes", after="runs", needs=_needs)
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    result = evidence.collective
    assert result is not None
    if node.name not in result.nodes:
        return f"takes no part ({result.backend})"
    if result.error:
        return "waited for the others"
    last = result.measured[-1] if result.measured else None
    parts = [f"{_speed(last.bus_bytes_per_s)} on the bus"] if last is not None and last.size_bytes > 8 and result.ranks > 1 else []
    parts += [f"{size_name(one.size_bytes)} in {seconds_text(one.seconds)}" for one in reversed(result.measured)]
    parts += [f"{size_name(size)} skipped: it would take {seconds:.0f} s" for size, seconds in result.left_out]
    return ", ".join([*parts, f"{result.ranks} ranks", result.backend])


def _speed(bytes_per_s: float) -> str:
    return f"{megabytes(bytes_per_s, '.0f' if bytes_per_s >= 9.95e6 else '.1f')} MB/s"
