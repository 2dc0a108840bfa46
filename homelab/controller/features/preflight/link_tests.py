"""The link tests between the nodes, for every ordered pair: connections first, then large and small packets, then throughput.

One process per node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.checks.evidence import NOT_DIALLED, Evidence, Link
from homelab.controller.checks.network import bandwidth
from homelab.controller.checks.network.blame import Pair, blame
from homelab.controller.checks.network.packet_loss import FAIL_LOSS
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight import packet_loss
from homelab.controller.remote import answers
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.remote.session import Stream
from homelab.shared.protocol.network_messages import Dial, Dials, Listening, MeetRequest

_TIMEOUT_S = 2.0  # of one connect: the kernel repeats a lost packet after 1 s
_OPEN_S = 20.0
_ANSWER_S = 20.0
# What is sent from every node to every other one to see how fast the wire is: 70 ms on 1 Gbit/s for three nodes. All that a node
# sends stays about the same however many nodes there are. A slow wire ends by time.
_SEND_BYTES_OF_NODE, _SEND_BYTES_LEAST, _SEND_BYTES_MOST = 24 << 20, 1 << 20, 8 << 20
_SEND_S_OF_NODE, _SEND_S_LEAST, _SEND_S_MOST = 2.0, 0.08, 0.2
# Nodes that send at the same time: more would measure this machine's switch, or its CPU where nodes share one.
_AT_ONCE = 8
_MANY = 8  # nodes: of more, each pair is looked at less closely
_SECOND_LOOKS = 4  # pairs of a node that are measured again before it is called slow


def between(fleet: Fleet, evidence: Evidence, *, measure_wire: bool) -> tuple[Link, ...]:
    """Every ordered pair of the nodes with a place on the LAN: the rendezvous port on the head where it is free, and ephemeral
    ones.

    Raises nothing for a node that fails: its links say why it was `NOT_DIALLED`. `measure_wire` False: without throughput.
    """
    of_head = evidence.facts[evidence.head].network.port if evidence.head in evidence.facts else None
    head = evidence.head if of_head is not None and of_head.free else None
    meeting = LinkTest(fleet, evidence, head, is_short=not measure_wire)
    try:
        links = meeting.dial()
        places = {name: (evidence.lan[name][0], ready.burst) for name, ready in meeting.ready.items() if ready.burst}
        links = packet_loss.with_losses(meeting.said, links, meeting.bursts, places)
        return _with_throughput(meeting, links) if measure_wire else links
    finally:
        meeting.close()


class LinkTest:
    """One stream to each node that could listen; `silent` says why the others could not. `is_short`: a fifth of a second for 300 small packets is too long."""

    def __init__(self, fleet: Fleet, evidence: Evidence, head: str | None, *, is_short: bool) -> None:
        self.evidence = evidence
        self.names = [name for name in evidence.lan if name in evidence.facts]
        self.packets = packet_loss.PACKETS_OF_MANY if is_short or len(self.names) > _MANY else packet_loss.PACKETS
        opened, self.silent = on_all(self.names, lambda name: _open(fleet, evidence, name, head))
        self.streams = {name: stream for name, (stream, _) in opened.items()}
        self.ready = {name: ready for name, (_, ready) in opened.items()}
        self.bursts: dict[Pair, packet_loss.Burst] = {}

    def close(self) -> None:
        on_all(self.streams, lambda name: self.streams[name].close())

    def ask(self, name: str, request: Mapping[str, Any], timeout_s: float) -> tuple[Dial, ...]:
        """One line to this node's process and the links of its answer. Raises HomelabError."""
        return self.said(name, request, timeout_s).links

    def said(self, name: str, request: Mapping[str, Any], timeout_s: float) -> Dials:
        """One line to this node's process and its answer. Raises HomelabError."""
        stream = self.streams[name]
        try:
            stream.write(json.dumps(request).encode() + b"\n")
            answer = decoded(stream.readline(timeout_s))
        except (ValueError, TimeoutError, OSError, EOFError) as error:
            raise _broken(name, f"its agent stopped answering ({_why(error)})") from error
        _refuse_failed(name, answer)
        fault = answers.fault("meet", answer)
        if fault:
            raise _broken(name, f"its agent sent something that homelab's never sends ({plain_lines(fault)})")
        return read(Dials, answer)

    def dial(self) -> tuple[Link, ...]:
        """The links of all pairs."""
        links_of, broken = on_all(self.streams, self._dial_from)
        links = [link for of_node in links_of.values() for link in of_node]
        # The node that failed is the target, in both directions: as a target it takes the blame.
        for name, error in {**self.silent, **broken}.items():
            links += [
                Link(other, name, self.evidence.lan[name][0], 0, False, error=f"{NOT_DIALLED}{error.message}")
                for other in self.names
                if other != name
            ]
        return tuple(links)

    def _dial_from(self, source: str) -> list[Link]:
        # The kernel's own time of each handshake is taken, so a few are enough.
        is_many = len(self.names) > _MANY
        often = 3 if is_many else 5
        targets: list[dict[str, Any]] = []
        tokens: dict[str, str] = {}
        for target, ready in self.ready.items():
            if target != source:
                first, *others = ready.ports
                # Where they are many, each dials another one of the other ports: together they dial them all.
                others = others[(turn := self.names.index(source) % len(others)) : turn + 1] if is_many and others else others
                ports = {str(port): often if port == first else 1 for port in (first, *others)}
                if ready.rendezvous:
                    ports[str(ready.rendezvous)] = 1
                targets.append({
                    "node": target, "address": self.evidence.lan[target][0], "ports": ports,
                    "udp": ready.udp, "packet_bytes": _packet_bytes(self.evidence, source, target),
                })  # fmt: skip
                if ready.burst:
                    tokens[target] = packet_loss.token()
                    targets[-1]["burst"] = {"port": ready.burst, "token": tokens[target]}
        dialled = self.ask(source, {"dial": targets, "timeout_s": _TIMEOUT_S, "packets": self.packets}, _ANSWER_S)
        for entry in dialled:
            if entry.sent and entry.node in tokens:
                self.bursts[source, entry.node] = packet_loss.Burst(tokens[entry.node], entry.sent)
        return [self._link(source, entry) for entry in dialled if entry.node in self.ready]

    def _link(self, source: str, entry: Dial) -> Link:
        target, port = entry.node, entry.port
        return Link(
            source=source, target=target, address=self.evidence.lan[target][0], port=port,
            is_rendezvous=port == self.ready[target].rendezvous, error=entry.error,
            latency_ms=entry.latency_ms, median_ms=entry.median_ms, worst_ms=entry.worst_ms,
            carried_bytes=entry.carried_bytes, lost_bytes=entry.lost_bytes,
            repeats=entry.repeats,
        )  # fmt: skip


def _open(fleet: Fleet, evidence: Evidence, name: str, head: str | None) -> tuple[Stream, Listening]:
    address = evidence.lan[name][0]
    request = MeetRequest(address=address, port=evidence.master_port if name == head else None, seconds=120)
    stream = fleet.agent(name).open("meet", request)
    try:
        answer = decoded(stream.readline(_OPEN_S))
        _refuse_failed(name, answer)
        ready = _listening(answer)
        if not ready.ports:
            raise ValueError(ready.error or "no port is free")
        return stream, ready
    except HomelabError:
        stream.close()
        raise
    except (ValueError, KeyError, TypeError, TimeoutError, OSError, EOFError) as error:
        stream.close()
        raise _broken(name, f"it could not listen on {address}: {_why(error)}") from error


def _listening(answer: Any) -> Listening:
    """Raises TypeError for what is no first line of `meet`."""
    try:
        return read(Listening, answer)
    except ValidationError as error:
        raise TypeError from error


def _why(error: Exception) -> str:
    """An error of the connection in its own words; what a program said that is not our agent is not worth them."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, KeyError | TypeError | json.JSONDecodeError):
        return "it answered with something that homelab's agent never sends"
    return plain_lines(str(error)) or type(error).__name__


def _refuse_failed(name: str, answer: Any) -> None:
    """Raises HomelabError if the agent's process has ended with an error of its own, whose words it said in place of an answer."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise _broken(name, f"its agent failed: {plain_lines(str(error.get('message'))[:300])}")


def _broken(name: str, message: str) -> HomelabError:
    return HomelabError(message, where=f"node {name}", hint=homelab("preflight --only network"))


def _packet_bytes(evidence: Evidence, *pair: str) -> int | None:
    """The largest packet that this pair will use: TCP agrees on the smaller MTU of the two."""
    sizes = []
    for name in pair:
        interface = evidence.lan[name][1]
        sizes += [entry.mtu for entry in evidence.facts[name].network.interfaces if entry.name == interface and entry.mtu]
    return min(sizes) if len(sizes) == len(pair) else None


def _with_throughput(meeting: LinkTest, links: tuple[Link, ...]) -> tuple[Link, ...]:
    """The links with the bytes per second of each pair, on the first of its ports, where all of them answered.

    Each node sends to its successor first, then to the next one: those that send at the same time send to different nodes, so
    no pair shares a wire with another (Ethernet carries both directions at once, as the ring of an all-reduce will).
    """
    failed = {(link.source, link.target) for link in links if link.error is not None and not link.is_rendezvous}
    first = {(link.source, link.target): link for link in reversed(links) if not link.is_rendezvous}
    # Where full packets vanish, or many of all, sending would only take its time until it is given up.
    lost = {(link.source, link.target) for link in links if link.lost_bytes is not None or (link.loss or 0.0) >= FAIL_LOSS}
    good = {pair: link for pair, link in first.items() if pair not in failed | lost}
    names = list(meeting.streams)
    in_turn = {
        source: [good[source, target] for target in names[place + 1 :] + names[:place] if (source, target) in good]
        for place, source in enumerate(names)
    }
    measured = _measure(meeting, in_turn, at_once=_AT_ONCE)
    measured = _second_look(meeting, good, measured)
    return tuple(
        replace(link, **measured.get((link.source, link.target), {})) if link is good.get((link.source, link.target)) else link
        for link in links
    )


def _measure(meeting: LinkTest, in_turn: Mapping[str, list[Link]], *, at_once: int) -> dict[Pair, dict[str, Any]]:
    """{pair: {"throughput_bytes_per_s"} or {"stalled"}}; pairs that were not measured are not in it."""
    others = max(1, len(meeting.names) - 1)
    limit_bytes = max(_SEND_BYTES_LEAST, min(_SEND_BYTES_OF_NODE // others, _SEND_BYTES_MOST))
    limit_s = max(_SEND_S_LEAST, min(_SEND_S_OF_NODE / others, _SEND_S_MOST))

    def send(source: str) -> tuple[Dial, ...]:
        targets = [{"node": link.target, "address": link.address, "port": link.port} for link in in_turn[source]]
        if not targets:
            return ()
        try:
            return meeting.ask(source, {"send": targets, "bytes": limit_bytes, "seconds": limit_s}, _ANSWER_S + 10 * len(targets))
        except HomelabError:
            return ()  # it was dialled well: what is not measured is not known

    with ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="wire") as pool:
        answered = dict(zip(in_turn, pool.map(send, in_turn), strict=True))
    return {
        (source, entry.node): {field: value for field in ("throughput_bytes_per_s", "stalled") if (value := getattr(entry, field))}
        for source, entries in answered.items()
        for entry in entries
    }


def _second_look(meeting: LinkTest, good: Mapping[Pair, Link], measured: dict[Pair, dict[str, Any]]) -> dict[Pair, dict[str, Any]]:
    """Before a node is called slow, a few of its pairs are measured again while all others are silent; the better value counts.

    Where they turn out well it was the machines that were busy, and nothing is known of its other pairs.
    """
    rates = _rates(measured)
    for pairs in blame({pair for pair in bandwidth.thin(rates) if not good[pair].loss}, meeting.evidence.head).values():
        chosen = _spread(pairs)
        for source, target in chosen:
            again = _measure(meeting, {source: [good[source, target]]}, at_once=1).get((source, target), {})
            if again.get("throughput_bytes_per_s", 0.0) > rates.get((source, target), 0.0):
                measured[source, target] = again
        still = _rates(measured)
        well = all(pair in still and pair not in bandwidth.thin(still) for pair in chosen)
        least = min((still[pair] for pair in chosen if pair in still), default=0.0)
        for pair in pairs:
            if pair not in chosen and well:
                measured.pop(pair, None)
            elif pair not in chosen:  # measured while the wire was still full of what others had sent
                measured[pair] = {"throughput_bytes_per_s": max(rates[pair], least)}
    return measured


def _rates(measured: Mapping[Pair, Mapping[str, Any]]) -> dict[Pair, float]:
    """Pair -> bytes per second, of those that have a throughput."""
    return {pair: float(entry["throughput_bytes_per_s"]) for pair, entry in measured.items() if "throughput_bytes_per_s" in entry}


def _spread(pairs: Iterable[Pair]) -> list[Pair]:
    """A few of the pairs, first and last ones, so that both directions are among them."""
    ordered = sorted(pairs)
    half = _SECOND_LOOKS // 2
    return ordered if len(ordered) <= _SECOND_LOOKS else ordered[:half] + ordered[-half:]
