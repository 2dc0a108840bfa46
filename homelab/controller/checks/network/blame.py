"""The fewest nodes that explain a set of bad pairs, so that one fault is one finding on the node that has it."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.base.units import listed
from homelab.controller.checks.evidence import Evidence

Pair = tuple[str, str]
_NAMED = 6  # a line with the names of 23 nodes is not read


def blame(pairs: Iterable[Pair], head: str) -> dict[str, list[Pair]]:
    """The fewest nodes that explain all bad (source, target) pairs, with the pairs of each.

    Greedy: the node in most pairs first; among equals the one that more often was the target (a firewall refuses what comes
    in), then one that is not the head. So a node that is cut off does not take the others' blame.
    """
    left = sorted(set(pairs))
    blamed: dict[str, list[Pair]] = {}
    while left:
        names = sorted({name for pair in left for name in pair})
        worst = max(names, key=lambda name: (sum(name in pair for pair in left), sum(name == pair[1] for pair in left), name != head))
        blamed[worst] = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
    return blamed


def others_of(node: str, pairs: Iterable[Pair]) -> list[str]:
    """The other ends of a node's pairs, by name."""
    return sorted({other for pair in pairs for other in pair if other != node})


def some(names: list[str]) -> str:
    """'laptop and tower'; of many the first ones and a number."""
    return listed(names if len(names) <= _NAMED else [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"])


def address_of(evidence: Evidence, node: str) -> str:
    """Where the others reach this node."""
    return evidence.lan[node][0] if node in evidence.lan else evidence.cluster.node(node).host


def direction(node: str, pairs: list[Pair]) -> str:
    """'to laptop', 'from laptop', or 'between it and laptop'."""
    sources = sorted({source for source, target in pairs if target == node})
    targets = sorted({target for source, target in pairs if source == node})
    if sources and targets:
        return f"between it and {some(others_of(node, pairs))}"
    return f"from {some(sources)}" if sources else f"to {some(targets)}"
