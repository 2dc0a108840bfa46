"""Asking the nodes everything a preflight and a plan need: facts in one round trip, then the dials between nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from homelab.checks.evidence import Evidence, Link
from homelab.config.cluster import Cluster
from homelab.config.recipe import Recipe
from homelab.control.material import Material
from homelab.errors import HomelabError
from homelab.facts import Facts
from homelab.planning import addresses
from homelab.remote.fanout import Fleet, on_all
from homelab.remote.session import Stream

FACTS_TIMEOUT_S = (
    120.0  # a matmul on a cold GPU can take half a minute; an unreachable node is found by its connect time-out
)
_DIAL_TIMEOUT_S = 2.0

Say = Callable[[str], None]


def evidence(
    fleet: Fleet,
    *,
    recipe: Recipe | None,
    material: list[Material],
    port: int,
    say: Say = lambda text: None,
    dial: bool = True,
) -> Evidence:
    """Everything that can be seen from here, unreachable nodes included. Raises nothing for a node that fails."""
    cluster = fleet.cluster
    on_node = {item.role: item.path for item in material if item.kind == "on-node"}
    say(f"asking {len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''} for facts")
    facts, unreachable, offsets = _facts(fleet, recipe, on_node, port)
    lan = addresses.lan_of_all(cluster, facts)
    well = [node.name for node in cluster.nodes if node.name in facts]
    head = well[0] if well else cluster.nodes[0].name
    latencies, _ = on_all(well, lambda name: _round_trip_ms(fleet, name))
    links: tuple[Link, ...] = ()
    if dial and len(lan) > 1:
        say("dialling from every node to every node")
        port_is_free = facts[head].port is not None and facts[head].port.free  # type: ignore[union-attr]
        links = _dial_all(fleet, lan, head if port_is_free else None, port)
    return Evidence(
        cluster=cluster, head=head, master_port=port, facts=facts, unreachable=unreachable, clock_offsets_s=offsets,
        latencies_ms=latencies, links=links, lan=lan, recipe=recipe, data=on_node,
    )  # fmt: skip


def _facts(
    fleet: Fleet, recipe: Recipe | None, data: Mapping[str, str], port: int
) -> tuple[dict[str, Facts], dict[str, HomelabError], dict[str, float]]:
    offsets: dict[str, float] = {}

    def one(name: str) -> Facts:
        agent = fleet.agent(name)
        request: dict[str, Any] = {"peers": addresses.peers_of(fleet.cluster, name), "port": port, "data": dict(data)}
        if recipe and recipe.model:
            request |= {"model": recipe.model.name, "revision": recipe.model.revision}
        asked_at = time.time()
        answer = agent.ask("facts", request, timeout_s=FACTS_TIMEOUT_S)
        answered_at = time.time()
        # The node looked at its clock between the two moments: only what lies outside of them is skew for sure.
        seen = float(answer["time"])
        offsets[name] = min(seen - asked_at, 0.0) or max(seen - answered_at, 0.0)
        return Facts.model_validate(answer)

    facts, unreachable = on_all([node.name for node in fleet.cluster.nodes], one)
    return facts, unreachable, offsets


def _round_trip_ms(fleet: Fleet, name: str) -> float:
    """Best of three round trips over the open connection; 0 for a local node."""
    session = fleet.agent(name).session
    measure = getattr(session, "round_trip_ms", None)
    return min(measure() for _ in range(3)) if measure else 0.0


def _dial_all(fleet: Fleet, lan: Mapping[str, tuple[str, str]], head: str | None, port: int) -> tuple[Link, ...]:
    """Every ordered pair of nodes: the rendezvous port on the head, two ephemeral ports elsewhere (gloo and NCCL need those)."""
    streams, _ = on_all(lan, lambda name: _listen(fleet, name, lan[name][0], port if name == head else None))
    try:

        def dial(source: str) -> list[Link]:
            targets = []
            for target, (_, ready) in streams.items():
                if target == source:
                    continue
                ports = list(ready["ports"]) + ([ready["rendezvous"]] if ready["rendezvous"] else [])
                targets += [{"node": target, "address": lan[target][0], "port": number} for number in ports]
            answer = fleet.agent(source).ask("dial", {"targets": targets, "timeout_s": _DIAL_TIMEOUT_S}, timeout_s=15)
            return [
                Link(
                    source=source, target=entry["node"], address=entry["address"], port=entry["port"],
                    is_rendezvous=entry["port"] == port and entry["node"] == head,
                    latency_ms=entry.get("latency_ms"), error=entry.get("error", "no answer"),
                )
                for entry in answer["links"]
            ]  # fmt: skip

        found, _ = on_all(lan, dial)
    finally:
        for stream, _ in streams.values():
            stream.close()
    return tuple(link for links in found.values() for link in links)


def _listen(fleet: Fleet, name: str, address: str, port: int | None) -> tuple[Stream, dict[str, Any]]:
    stream = fleet.agent(name).open("listen", {"address": address, "port": port, "seconds": 30})
    try:
        return stream, json.loads(stream.readline(10.0))
    except (ValueError, TimeoutError, OSError) as error:
        stream.close()
        raise HomelabError(
            f"it could not listen on {address}: {error}", where=f"node {name}", hint="homelab preflight --only network"
        ) from error



def reachable(cluster: Cluster, evidence: Evidence) -> Cluster:
    """The cluster without the nodes that gave no facts."""
    return cluster.only(tuple(evidence.facts))
