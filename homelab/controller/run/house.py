"""What the nodes say of their owners before a run begins, when no supervisor looks yet: whoever is there now has the machine."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from homelab.controller.base import daily_hours
from homelab.controller.config.cluster import Node
from homelab.controller.facts.reading import read
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run.leave import HOURS, Away, Leave, sign_key
from homelab.shared.protocol.house_messages import House, HouseRequest

_ASK_S = 10.0


def request(node: Node, run: str | None = None) -> HouseRequest:
    """The question to this node. `run`: whose processes and start it knows."""
    return HouseRequest(run=run, yield_to=node.yield_to, yield_when=node.yield_when)


def signs(node: Node, said: House) -> dict[str, Away]:
    """Key -> why the node is its owner's, of all that speaks for it."""
    spans = daily_hours.spans(node.hours) if node.hours else ()
    opens = daily_hours.opens(spans, said.minute) if spans else None
    closed = {HOURS: Away(daily_hours.clock(opens), HOURS)} if opens is not None else {}
    return closed | {sign_key(sign): Away("", sign.words) for sign in said.signs}


def seen(fleet: Fleet, names: Collection[str], run: str | None = None) -> dict[str, dict[str, Away]]:
    """Node -> its signs now (`signs`), of those that answer."""
    answers, _ = fleet.ask("house", lambda node: request(node, run), names=names, timeout_s=_ASK_S)
    return {name: signs(fleet.cluster.node(name), read(House, answer)) for name, answer in answers.items()}


def away(fleet: Fleet, names: Collection[str], leaves: Mapping[str, Leave]) -> dict[str, Away]:
    """Node -> why it is its owner's now, of those that answer. `leaves`: with what a person has overridden."""
    found = {}
    for name, its in seen(fleet, names).items():
        ignored = leaves[name].overridden(time.time()) if name in leaves else ()
        counting = [one for key, one in its.items() if key not in ignored]
        if counting:
            found[name] = counting[0]
    return found
