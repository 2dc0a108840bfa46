"""Whether the layers of a pipeline are cut well: after each checkpoint the nodes are asked for what they have measured, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from homelab.controller.attempt import planner
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import gather
from homelab.controller.planning.strategy.pipeline import recut
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run.fingerprint import as_begun
from homelab.shared.protocol import phases


class RecutWatch:
    """`see` looks at the newest statuses; `because` says why another cut from the newest checkpoint on pays, "" where none does."""

    def __init__(self, cluster: Cluster, recipe: Recipe, items: list[RecipeInput], plan: Plan) -> None:
        self._cluster = cluster.only(tuple(node.name for node in plan.nodes))
        self._items = items
        self._plan = plan
        self._recipe = as_begun(recipe, plan)
        self._began_s = time.monotonic()
        self._saw_start = False  # a supervisor may have been ended and started again while the ranks train
        self._start_s: float | None = None  # from the start of the ranks to their first step; None: it was not seen
        self._asked = plan.resume_step
        self.because = ""
        self._asking: threading.Thread | None = None

    def see(self, statuses: Mapping[str, NodeStatus], checkpoint: int) -> None:
        """Note when the training began, and ask the nodes once after every checkpoint that all of them hold."""
        now = {rank.phase for status in statuses.values() for rank in status.ranks.values()}
        self._saw_start = self._saw_start or (bool(now) and now <= phases.BEFORE_TRAINING)
        if self._start_s is None and self._saw_start and phases.TRAINING in now:
            self._start_s = time.monotonic() - self._began_s
        is_asking = self._asking is not None and self._asking.is_alive()
        if self._start_s is not None and checkpoint > self._asked and not is_asking:
            self._asked, self.because = checkpoint, ""
            self._asking = threading.Thread(target=self._ask, args=(checkpoint, self._start_s), daemon=True, name="recut")
            self._asking.start()

    def _ask(self, checkpoint: int, restart_s: float) -> None:
        name = self._plan.run
        try:
            with Fleet(self._cluster) as fleet:
                evidence = gather.facts(fleet, recipe=self._recipe, material=self._items, port=0)
            inputs = planner.inputs_from(
                evidence, self._recipe, self._items, name, attempt=self._plan.attempt, port=0, resume_step=checkpoint
            )
            faster = recut.faster(inputs, self._plan, restart_s)
        except HomelabError:
            return  # the watchdog sees a node that is gone
        self.because = faster.because if faster else ""
