"""Wake the nodes of a cluster that sleep, and wait until they answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from homelab.controller.base.errors import HomelabError, SilentError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.node_commands import by_root, on_node
from homelab.controller.features.wake import sleepers
from homelab.controller.features.wake.sleepers import Sleeper
from homelab.controller.remote.agent import connect
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.shared.protocol import magic_packet
from homelab.shared.protocol.network_messages import WakeRequest

LIMIT_S = 180.0  # a machine that was off needs its firmware's checks and a start of its system
_LOGIN_S = 40.0  # a system that starts refuses logins until it is up (pam_nologin)
_PAUSE_S = 1.0  # between two logins
_AGAIN_S = 5.0  # between two packets for one machine: a switch may still be learning where its port is


State = Literal["awake", "woken", "silent", "unknown"]


class Woken(DisplayValue):
    """What became of one node. `seconds` from the first packet to its answer. `mac`, `wakes`: see `Sleeper`; None where nothing is remembered."""

    state: State
    seconds: float | None = None
    mac: str | None = None
    wakes: bool | None = None


def wake(cluster: Cluster, names: Sequence[str], say: Say, *, limit_s: float = LIMIT_S) -> tuple[dict[str, Woken], dict[str, HomelabError]]:
    """Send packets to each of these nodes that does not answer, until it does. The errors are those of nodes that still do not."""
    say(f"asking {len(names)} node{'s' if len(names) > 1 else ''} whether they are awake")
    errors = {
        name: error for name, error in on_all(names, lambda name: connect(cluster, cluster.node(name)).close())[1].items() if _sleeps(error)
    }
    known = {name: sleepers.recall(cluster.node(name)) for name in names}
    done = {name: _woken("unknown" if name in errors else "awake", known[name]) for name in names}
    asleep = {name: sleeper for name, sleeper in known.items() if name in errors and sleeper}
    errors = {name: _never_asked(cluster.node(name), error) for name, error in errors.items() if name not in asleep}
    is_over = threading.Event()
    others = [node.name for node in cluster.nodes if node.name not in done] if asleep else []
    unreachable = on_all(others, lambda name: connect(cluster, cluster.node(name)).close())[1]
    helpers = [name for name in (*names, *others) if name not in unreachable and (name in others or done[name].state == "awake")]
    with Fleet(cluster) as fleet:

        def one(name: str) -> Woken:
            waiting = _Waiting(fleet, helpers, say, limit_s, is_over)
            return waiting.until_awake(name, asleep[name])

        woken, still_silent = on_all(asleep, one, stop=is_over.set)
    done |= woken | {name: _woken("silent", known[name]) for name in still_silent}
    return done, errors | still_silent


@dataclass(frozen=True)
class _Waiting:
    """For nodes that sleep. `helpers`: nodes that are awake; `is_over`: the person has given up."""

    fleet: Fleet
    helpers: Sequence[str]
    say: Say
    limit_s: float
    is_over: threading.Event

    def until_awake(self, name: str, sleeper: Sleeper) -> Woken:
        """Send packets until it answers. Raises HomelabError, which says why it does not."""
        node, start_s = self.fleet.cluster.node(name), time.monotonic()
        sent_s: float | None = None
        answered_s: float | None = None
        while True:
            now_s = time.monotonic()
            if sent_s is None or now_s - sent_s >= _AGAIN_S:
                by = _send(self.fleet, sleeper, self.helpers)
                if by is None:
                    raise _not_in_its_network(node, sleeper)
                sent_s = now_s
            self.say(
                f"{name}: {by} sent a packet to {sleeper.mac}; waiting for an answer ({now_s - start_s:.0f} s of at most {self.limit_s:.0f})"
            )
            try:
                connect(self.fleet.cluster, node).close()
                return _woken("woken", sleeper, round(time.monotonic() - start_s, 1))
            except HomelabError as error:
                now_s = time.monotonic()
                if answered_s is None and not _sleeps(error):
                    answered_s = now_s
                if now_s - start_s > self.limit_s:
                    raise (_does_not_wake(node, sleeper, self.limit_s, error) if _sleeps(error) else error) from error
                if answered_s is not None and now_s - answered_s > _LOGIN_S:
                    raise
                if self.is_over.wait(_PAUSE_S):
                    raise


def _send(fleet: Fleet, sleeper: Sleeper, helpers: Sequence[str]) -> str | None:
    """Who sent the packet: this machine and a node, where they are in that network; None where nobody is.

    Both, since this machine may be in another network of the same addresses: most homes have 192.168.1.0/24.
    """
    senders = []
    if magic_packet.is_in(sleeper.network):
        with contextlib.suppress(OSError):  # the cable of this machine was pulled: a node may still do it
            magic_packet.send(sleeper.mac, sleeper.network)
            senders.append("this machine")
    for helper in helpers:
        with contextlib.suppress(HomelabError):
            if fleet.agent(helper).ask("wake", WakeRequest(mac=sleeper.mac, network=sleeper.network))["sent"]:
                senders.append(helper)
                break
    return listed(senders) or None


def _sleeps(error: HomelabError) -> bool:
    """Whether nothing came back. A name that only its owner announces (tower.local) is unknown while that machine sleeps."""
    return isinstance(error, SilentError) or isinstance(error.__cause__, socket.gaierror)


def _woken(state: State, sleeper: Sleeper | None, seconds: float | None = None) -> Woken:
    return Woken(state=state, seconds=seconds, mac=sleeper.mac if sleeper else None, wakes=sleeper.wakes if sleeper else None)


def _never_asked(node: Node, error: HomelabError) -> HomelabError:
    return UnreachableError(
        "it does not answer, and its network card is not known here: homelab remembers it from the first command that reaches the node",
        where=error.where, hint=Hint("switch {} on by hand, then: {}", node.name, homelab("preflight")),
    )  # fmt: skip


def _not_in_its_network(node: Node, sleeper: Sleeper) -> HomelabError:
    return UnreachableError(
        f"it does not answer, and no machine can wake it: neither this machine nor a node that is awake is in its network {sleeper.network}",
        where=f"node {node.name} ({sleeper.mac} on {sleeper.interface})", hint=Hint("join that network, or switch on one of its machines, then: {}", homelab("wake", node.name)),
    )  # fmt: skip


def _does_not_wake(node: Node, sleeper: Sleeper, limit_s: float, error: HomelabError) -> HomelabError:
    enable = on_node(node, by_root(quote_words(["ethtool", "-s", sleeper.interface, "wol", "g"])))
    why = {
        True: "its network card was set up to wake it: check its firmware settings (Wake on LAN on, ErP off), its cable and its power",
        False: "its network card was not set up to wake it",
        None: "homelab does not know whether its network card was set up to wake it",
    }[sleeper.wakes if sleeper.kind == "physical" else None]
    if sleeper.kind == "wifi":
        why = "it was on Wi-Fi, and few Wi-Fi cards can wake a machine: connect a cable"
    return SilentError(
        f"no answer within {limit_s:.0f} s after packets for {sleeper.mac} in {sleeper.network}: {why}", where=error.where,
        hint=Hint("switch it on by hand, allow it once with {}, then: {}", enable, homelab("wake", node.name)),
    )  # fmt: skip
