"""What a misconfiguration is, and the two ways to add one: `add` with a function, or the decorator `misconfiguration`.

The list of all of them is in `catalogue.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import homelab
from homelab.lab.lab import Lab

# inject(lab, node): a context manager that undoes the change at its end.
Inject = Callable[[Lab, str], AbstractContextManager[object]]
Steps = Callable[[Lab, str], Iterator[None]]
Where = Literal["any", "head", "pair"]
Need = Literal["card", "recipe", "deep"]


class NotInjectable(HomelabError):
    """This machine cannot have this misconfiguration: a program or a folder that it needs is missing."""


@dataclass(frozen=True)
class Misconfiguration:
    """One thing that is wrong with a node.

    `checks`: ids of checks of preflight; each of them counts as having found it. `inject` raises NotInjectable where this machine
    cannot have it. `where`: "head" makes sense on the first node of the cluster only; with "pair" the node after it is as
    much to blame. `needs`: "card" a graphics card (`cards.healthy` makes one), "recipe" the recipe of `training_files`, "deep"
    `preflight --deep`. `namespaces`: whether it needs a lab of the namespaces backend.
    """

    name: str
    title: str
    checks: tuple[str, ...]
    inject: Inject
    where: Where = "any"
    needs: tuple[Need, ...] = ()
    namespaces: bool = True


# Filled by importing the modules that define misconfigurations; read by `catalogue.py` alone.
REGISTERED: dict[str, Misconfiguration] = {}


def add(
    name: str, title: str, *checks: str, inject: Inject, where: Where = "any", needs: tuple[Need, ...] = (), namespaces: bool = True
) -> None:
    """Add one to the list."""
    assert name not in REGISTERED and checks, name
    REGISTERED[name] = Misconfiguration(name, title, checks, inject, where, needs, namespaces)


def misconfiguration(
    name: str, title: str, *checks: str, where: Where = "any", needs: tuple[Need, ...] = (), namespaces: bool = True
) -> Callable[[Steps], Steps]:
    """Add a generator function (inject; yield; undo in `finally`) to the list."""

    def register(steps: Steps) -> Steps:
        inject = contextlib.contextmanager(steps)
        add(name, title, *checks, inject=inject, where=where, needs=needs, namespaces=namespaces)
        return steps

    return register


def node_for(misconfiguration: Misconfiguration, lab: Lab) -> str:
    """The node of `lab` that it is tried on: the head, or the second node."""
    return lab.nodes[0].name if misconfiguration.where == "head" or len(lab.nodes) == 1 else lab.nodes[1].name


def peer_of(lab: Lab, node: str) -> str:
    """The node after `node`; after the last one comes the first. Raises InputError in a lab of one node."""
    names = [other.name for other in lab.nodes]
    if len(names) < 2:
        raise InputError("a fault between two nodes needs two", where=str(lab.folder), hint=homelab("lab up --nodes 2"))
    return names[(names.index(node) + 1) % len(names)]
