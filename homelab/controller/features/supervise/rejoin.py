"""Nodes that were left out after a failure: are they well again? Asked in the background, so that the supervisor does not wait for a dead node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.checks import registry
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import gather
from homelab.controller.remote.fanout import Fleet

_EVERY_S = 5.0


class RejoinMonitor:
    """A context manager. `well` holds the nodes that answered, passed their own preflight, and reach the `others` both ways. One that `is_away` with its
    owner is not asked."""

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        items: list[RecipeInput],
        names: Collection[str],
        others: Collection[str],
        skip: Collection[str],
        is_away: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._cluster, self._recipe, self._items, self._others, self._skip = cluster, recipe, items, tuple(others), skip
        self._is_away = is_away
        self._well: set[str] = set()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,), daemon=True, name=f"return of {name}") for name in names]

    def __enter__(self) -> RejoinMonitor:
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
            if self._is_away(name):  # whoever plays a game there is not disturbed
                self._well.discard(name)
                continue
            try:
                # The others train: they are asked for dials only when the node itself is well, and only once.
                is_well = self._is_well((name,)) and (name in self._well or self._is_well((*self._others, name)))
            except HomelabError:
                is_well = False
            if is_well:
                self._well.add(name)
            else:
                self._well.discard(name)

    def _is_well(self, names: tuple[str, ...]) -> bool:
        with Fleet(self._cluster.only(names)) as fleet:
            evidence = gather.evidence(fleet, recipe=self._recipe, material=self._items, port=0, measure_wire=False)
        findings = registry.judge_all(evidence, self._skip)
        # Of several nodes only what is between them counts: the others are busy, and hold what they hold.
        counts = [finding for finding in findings if len(names) == 1 or finding.check == "network.reach"]
        return set(evidence.facts) == set(names) and not any(finding.keeps_out for finding in counts)
