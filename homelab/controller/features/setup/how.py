"""How a setup is done, as the person wants it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class How:
    """`check`: only compare. `upgrade`: the newest versions instead of those that were resolved first.

    `fetches_here`: no node fetches a package from the index. `between_nodes`: what this machine has goes to one node, and from there to the others.
    """

    check: bool = False
    upgrade: bool = False
    fetches_here: bool = False
    between_nodes: bool = False
