"""Asking the nodes everything a preflight and a plan need: facts in one round trip, then the dials between nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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
# What is sent from every node to every other one to see how fast the wire is: 70 ms on 1 Gbit/s. A slow wire ends by time.
_SEND_BYTES = 8 << 20
_SEND_S = 0.2

Say = Callable[[str], None]


def evidence(
    fleet: Fleet,
    *,
    recipe: Recipe | None,
    material: list[Material],
    port: int,
    say: Say = lambda text: None,
    measure_wire: bool = True,
) -> Evidence:
    """Everything that can be seen from here, unreachable nodes included. Raises nothing for a node that fails.

    `measure_wire` False leaves out the throughput between the nodes, for a caller in a hurry (recovery).
    """
    cluster = fleet.cluster
    on_node = {item.role: item.path for item in material if item.kind == "on-node"}
    say(f"asking {len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''} for facts")
    facts, unreachable, offsets = _facts(fleet, recipe, on_node, port)
    lan = addresses.lan_of_all(cluster, facts)
    well = [node.name for node in cluster.nodes if node.name in facts]
    head = well[0] if well else cluster.nodes[0].name
    latencies, _ = on_all(well, lambda name: _round_trip_ms(fleet, name))
    links: tuple[Link, ...] = ()
    if len(lan) > 1:
        say("dialling from every node to every node")
        port_is_free = facts[head].port is not None and facts[head].port.free  # type: ignore[union-attr]
        links = _dial_all(fleet, lan, head if port_is_free else None, port, measure_wire)
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
        if recipe and recipe.method:
            request["method"] = recipe.method.model_dump(mode="json", include={"kind", "rank", "targets"})
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


def _dial_all(
    fleet: Fleet, lan: Mapping[str, tuple[str, str]], head: str | None, port: int, measure_wire: bool
) -> tuple[Link, ...]:
    """Every ordered pair of nodes: the rendezvous port on the head, two ephemeral ports elsewhere (gloo and NCCL need those).

    Then, when all have dialled, bytes: a wire that is busy would look like a slow one to a dial.
    """
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
        links = tuple(link for links in found.values() for link in links)
        return _with_throughput(fleet, list(lan), links) if measure_wire else links
    finally:
        for stream, _ in streams.values():
            stream.close()


def _with_throughput(fleet: Fleet, names: list[str], links: tuple[Link, ...]) -> tuple[Link, ...]:
    """The links with the bytes per second of each pair, on the first of its ports that answered.

    All nodes send at once, each to its successor first, then to the next one: every node sends to one and receives from
    one, so no pair shares a wire with another (Ethernet carries both directions at once, as the ring of an all-reduce will).
    """

    def measure(source: str) -> dict[tuple[str, str, int], float]:
        place = names.index(source)
        targets = []
        for target in names[place + 1 :] + names[:place]:
            pair = [link for link in links if (link.source, link.target) == (source, target)]
            good = [link for link in pair if link.error is None and not link.is_rendezvous]
            if good and len(good) == sum(not link.is_rendezvous for link in pair):
                targets.append({"node": target, "address": good[0].address, "port": good[0].port})
        if not targets:
            return {}
        body = {"targets": targets, "send_bytes": _SEND_BYTES, "send_s": _SEND_S, "timeout_s": _DIAL_TIMEOUT_S}
        answer = fleet.agent(source).ask("dial", body, timeout_s=15 + 10 * len(targets))
        return {
            (source, entry["node"], entry["port"]): entry["throughput_bytes_per_s"]
            for entry in answer["links"]
            if entry.get("throughput_bytes_per_s")
        }

    found, _ = on_all(names, measure)
    seen = {key: value for of_node in found.values() for key, value in of_node.items()}
    return tuple(
        replace(link, throughput_bytes_per_s=seen.get((link.source, link.target, link.port))) for link in links
    )


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
