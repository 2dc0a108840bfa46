"""Nodes that were left out after a failure: are they well again? Asked in the background, so that nobody waits for a dead one."""

from __future__ import annotations

import threading
from collections.abc import Collection

from homelab.checks import registry
from homelab.config.cluster import Cluster
from homelab.config.recipe import Recipe
from homelab.control import gather
from homelab.control.material import Material
from homelab.errors import HomelabError
from homelab.remote.fanout import Fleet

_EVERY_S = 5.0


class Returning:
    """A context manager. `well` holds the nodes that answered and passed their own preflight since they were left out."""

    def __init__(self, cluster: Cluster, recipe: Recipe, items: list[Material], names: Collection[str], skip: Collection[str]) -> None:
        self._cluster, self._recipe, self._items, self._skip = cluster, recipe, items, skip
        self._well: set[str] = set()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,), daemon=True, name=f"return of {name}") for name in names]

    def __enter__(self) -> Returning:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def well(self) -> frozenset[str]:
        """Their names."""
        return frozenset(self._well)

    def _ask(self, name: str) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                with Fleet(self._cluster.only((name,))) as fleet:
                    seen = gather.facts(fleet, recipe=self._recipe, material=self._items, port=0)
            except HomelabError:
                continue
            if seen.facts and not any(finding.level == "fail" for finding in registry.judge_all(seen, self._skip)):
                self._well.add(name)
            else:
                self._well.discard(name)
