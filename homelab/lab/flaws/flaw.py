"""What a flaw is, and on which node it is tried. The list of all of them is in `catalogue.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from homelab.errors import HomelabError, InputError
from homelab.lab.lab import Lab

Inject = Callable[[Lab, str], AbstractContextManager[None]]
Steps = Callable[[Lab, str], Iterator[None]]


class NotInjectable(HomelabError):
    """This machine cannot have this flaw: a program or a folder that it needs is missing."""


@dataclass(frozen=True)
class Flaw:
    """One thing that is wrong with a node.

    `checks`: the ids of the checks of preflight of which any counts as having found it. `inject(lab, node)` is a context
    manager that undoes it; it raises NotInjectable where this machine cannot have it. `module`: where it is defined. `place`: on
    which kind of node it makes sense; "head" is the first node of the cluster. `pair`: the node after it is as much to blame.
    `card`: it is about the node's graphics card, which `cards.healthy` must have put there. `recipe`: preflight needs the recipe
    of `material.py` to see it. `deep`: only `preflight --deep` can see it.
    """

    name: str
    title: str
    checks: tuple[str, ...]
    inject: Inject
    module: str
    place: Literal["other", "head"] = "other"
    pair: bool = False
    card: bool = False
    recipe: bool = False
    deep: bool = False


# Filled by importing the modules that define flaws; read by `catalogue.py` alone.
REGISTERED: dict[str, Flaw] = {}


def flaw(
    name: str,
    title: str,
    *checks: str,
    place: Literal["other", "head"] = "other",
    pair: bool = False,
    card: bool = False,
    recipe: bool = False,
    deep: bool = False,
) -> Callable[[Steps], Steps]:
    """Add a generator function (inject; yield; undo in `finally`) to the list of flaws."""

    def add(steps: Steps) -> Steps:
        assert name not in REGISTERED and checks, name
        inject = contextlib.contextmanager(steps)
        REGISTERED[name] = Flaw(name, title, checks, inject, steps.__module__, place, pair, card, recipe, deep)
        return steps

    return add


def node_for(flaw: Flaw, lab: Lab) -> str:
    """The node of `lab` that a flaw is tried on: the head, or the second node."""
    return lab.nodes[0].name if flaw.place == "head" or len(lab.nodes) == 1 else lab.nodes[1].name


def blamed(flaw: Flaw, lab: Lab, node: str) -> set[str]:
    """The nodes a finding may name when `node` has this flaw."""
    return {node, peer_of(lab, node)} if flaw.pair else {node}


def peer_of(lab: Lab, node: str) -> str:
    """The node after `node`, the last one's is the first. Raises InputError in a lab of one node."""
    names = [other.name for other in lab.nodes]
    if len(names) < 2:
        raise InputError("a flaw between two nodes needs two", where=str(lab.folder), hint="homelab lab up --nodes 2")
    return names[(names.index(node) + 1) % len(names)]
