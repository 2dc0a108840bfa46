"""Asking the nodes everything a preflight and a plan need: facts in one round trip, then the dials between nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config import interpreter
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.features.preflight import link_tests
from homelab.controller.features.wake import sleepers
from homelab.controller.planning.machines import cards, lan_address
from homelab.controller.remote import ship
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.run import hub_token, process_owner

# A matmul on a cold GPU can take half a minute; an unreachable node is found by its connect time-out, and one that is lost meanwhile by the signs of
# life that SSH asks for.
FACTS_TIMEOUT_S = 120.0
ALL_PROBES_S = 240.0  # the limits of all programs that the probes ask, one after the other
DATA_S = 1800.0  # a hard disk reads 100 MB/s and more: 180 GB, once
DEEP_S = 90.0  # the agent reads a model's files for 60 s at the most


def facts(
    fleet: Fleet, *, recipe: Recipe | None, material: list[RecipeInput], port: int, say: Say = lambda text: None,
    deep: bool = False, for_person: bool = False,
) -> Evidence:  # fmt: skip
    """What every node says of itself, unreachable ones included. Raises nothing for a node that fails.

    `deep` reads the model's files to the last byte, once (the nodes keep the digests). `for_person`: a person waits, and nothing of a run is on the nodes.
    A node may then take the time to read a large file of data for the first time, and Ctrl-C gives all nodes up. A recovery finds the digest kept,
    has no time for a node whose disk hangs, and asks the nodes more after Ctrl-C.
    """
    cluster = fleet.cluster
    on_node = {item.role: item.path for item in material if item.kind == "on-node"}
    say(f"asking {len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''} for facts")
    patience_s = (ALL_PROBES_S if for_person else FACTS_TIMEOUT_S) + (DEEP_S if deep else 0.0) + (DATA_S if on_node and for_person else 0.0)
    answers, unreachable, offsets, took = _facts(fleet, recipe, on_node, port, deep, patience_s, fleet.give_up_all if for_person else None)
    well = [node.name for node in cluster.nodes if node.name in answers]
    latencies, _ = on_all(well, lambda name: _round_trip_ms(fleet, name))
    greetings = {name: getattr(fleet.agent(name).session, "greeting_s", 0.0) for name in latencies}
    without_effect = {name: getattr(fleet.agent(name).session, "without_effect", ()) for name in latencies}
    lan = lan_address.lan_of_all(cluster, answers)
    sleepers.remember(cluster.nodes, answers, lan)
    return Evidence(
        cluster=cluster, head=well[0] if well else cluster.nodes[0].name, master_port=port, code_hash=ship.CODE.content_hash(),
        facts=answers, unreachable=unreachable, clock_offsets_s=offsets, latencies_ms=latencies, answer_seconds=took, greetings_s=greetings,
        without_effect=without_effect, lan=lan, recipe=recipe, data=on_node,
    )  # fmt: skip


def with_links(fleet: Fleet, gathered: Evidence, *, say: Say = lambda text: None, measure_wire: bool = True) -> Evidence:
    """The same evidence with the dials between the nodes. `measure_wire` False: without throughput, for who is in a hurry."""
    if len(gathered.lan) < 2:
        return gathered
    say("connecting every node to every other node")
    return replace(gathered, links=link_tests.between(fleet, gathered, measure_wire=measure_wire))


def evidence(
    fleet: Fleet, *, recipe: Recipe | None, material: list[RecipeInput], port: int, say: Say = lambda text: None,
    measure_wire: bool = True, for_person: bool = False,
) -> Evidence:  # fmt: skip
    """Everything that can be seen from here: facts and dials."""
    gathered = facts(fleet, recipe=recipe, material=material, port=port, say=say, for_person=for_person)
    return with_links(fleet, gathered, say=say, measure_wire=measure_wire)


def _facts(
    fleet: Fleet,
    recipe: Recipe | None,
    data: Mapping[str, str],
    port: int,
    deep: bool,
    patience_s: float,
    stop: Callable[[], object] | None,
) -> tuple[dict[str, Facts], dict[str, HomelabError], dict[str, float], dict[str, float]]:
    offsets: dict[str, float] = {}
    took: dict[str, float] = {}

    def one(name: str) -> Facts:
        agent = fleet.agent(name)
        request: dict[str, Any] = {"peers": lan_address.peers_of(fleet.cluster, name), "port": port, "data": dict(data), "deep": deep}
        request["unsloth_python"] = fleet.cluster.node(name).unsloth_python
        request["compiles"] = interpreter.uses_unsloth(recipe)  # Triton compiles the launcher of its kernels
        request["token_sent"] = bool(hub_token.to_send())  # a launch would bring it along
        if recipe and recipe.environment:
            request["recipe_environment"] = recipe.environment
        if recipe and recipe.model:
            request |= {"model": recipe.model.name, "revision": recipe.model.revision}
        if recipe and recipe.method:
            request["method"] = {key: getattr(recipe.method, key) for key in ("kind", "base", "rank", "targets")}
        asked_at = time.time()
        answer = agent.ask("facts", request, timeout_s=patience_s)
        answered_at = time.time()
        took[name] = answered_at - asked_at
        # The node looked at its clock between two moments: only what lies outside of them is skew for sure.
        facts = Facts.model_validate(answer)
        if facts.system.time is not None:
            latest = max(asked_at, answered_at - (facts.system.time_s_ago or 0.0))
            offsets[name] = min(facts.system.time - asked_at, 0.0) or max(facts.system.time - latest, 0.0)
        return cards.chosen(fleet.cluster.node(name), _without_the_dead(facts))

    answers, unreachable = on_all([node.name for node in fleet.cluster.nodes], one, stop=stop)
    return answers, unreachable, offsets, took


def _without_the_dead(facts: Facts) -> Facts:
    """The node hears of a supervisor for a while after its end: one that was on this machine is known to be gone."""
    living = {run: supervisor for run, supervisor in facts.runs.recovered.items() if not process_owner.is_dead(supervisor.process)}
    return (
        facts.model_copy(update={"runs": facts.runs.model_copy(update={"recovered": living})}) if living != facts.runs.recovered else facts
    )


def _round_trip_ms(fleet: Fleet, name: str) -> float:
    """Best of three round trips over the open connection; 0 for a local node."""
    session = fleet.agent(name).session
    measure = getattr(session, "round_trip_ms", None)
    return min(measure() for _ in range(3)) if measure else 0.0
