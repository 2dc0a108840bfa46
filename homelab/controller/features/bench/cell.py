"""The cells of a suite: which strategy on which nodes in which variation. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.config.suite import NodeSet, Suite

ALONE = "alone"
"""The strategy of a single rank: all of them are the same then."""


@dataclass(frozen=True)
class Cell:
    """One strategy on some nodes. `variation` is empty where the suite has none."""

    variation: str
    strategy: str
    nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        """For people: zero2 on tower, laptop."""
        return f"{self.strategy} on {', '.join(self.nodes)}" + (f" ({self.variation})" if self.variation else "")

    @property
    def file_stem(self) -> str:
        """For names of files and runs: small letters, digits and hyphens."""
        parts = [self.variation, self.strategy, *self.nodes]
        return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part)


def cells_of(suite: Suite, ranks_of: Mapping[str, int]) -> tuple[Cell, ...]:
    """Every cell once, nodes alone first. `ranks_of`: node -> its cards (1 for a CPU), in the order of cluster.toml.

    Sets that are the same nodes on this cluster are one. Raises InputError for nodes that it does not have.
    """
    names = list(ranks_of)
    sets = dict.fromkeys(nodes for chosen in suite.nodes for nodes in _sets(chosen, names))
    cells: dict[Cell, None] = {}
    for variation in [variation.name for variation in suite.variations] or [""]:
        for nodes in sorted(sets, key=len):
            strategies = (ALONE,) if sum(ranks_of[name] for name in nodes) == 1 else suite.strategies
            cells.update(dict.fromkeys(Cell(variation, strategy, nodes) for strategy in strategies))
    stems = [cell.file_stem for cell in cells]
    for place, cell in enumerate(cells):
        if cell.file_stem in stems[:place]:
            raise InputError(
                f'two cells would have one name, "{cell.file_stem}"',
                where="the suite, `variations` and `nodes`",
                hint="give the variations names with different letters or digits",
            )
    return tuple(cells)


def _sets(chosen: NodeSet, names: Sequence[str]) -> list[tuple[str, ...]]:
    if chosen == "each":
        return [(name,) for name in names]
    if chosen == "all":
        return [tuple(names)]
    if isinstance(chosen, int):
        if chosen > len(names):
            raise InputError(
                f"{chosen} nodes are asked for, but there are {len(names)}: {', '.join(names)}",
                where="the suite, `nodes`",
                hint='"all" means all of them',
            )
        return [tuple(names[:chosen])]
    for name in chosen:
        if name not in names:
            raise InputError(
                f'no node is called "{name}".{did_you_mean(name, names)}',
                where="the suite, `nodes`",
                hint=f"the cluster has {', '.join(names)}",
            )
    if len(set(chosen)) < len(chosen):
        raise InputError(f"a node is named twice: {', '.join(chosen)}", where="the suite, `nodes`", hint="name each node once")
    return [tuple(name for name in names if name in chosen)]
