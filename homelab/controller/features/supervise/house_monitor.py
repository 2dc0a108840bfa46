"""What the nodes of a run say of their owners: in the status lines of those that train, and asked of the others in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.reading import read
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import house
from homelab.shared.protocol.house_messages import House

ASK_S = 5.0


class HouseMonitor:
    """`sights` has the newest word of each node, and when it came (monotonic). `statuses`: of the nodes that are followed. `is_lent`: a person has given
    the node away, so it is not asked. `failed` hears of each question that this machine could not ask.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: str,
        statuses: Callable[[], Mapping[str, NodeStatus]],
        is_lent: Callable[[str], bool],
        failed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._cluster, self._run, self._statuses, self._is_lent, self._failed = cluster, run, statuses, is_lent, failed
        self._sights: dict[str, tuple[House, float]] = {}
        self._ended = threading.Event()
        for node in cluster.nodes:
            threading.Thread(target=self._ask, args=(node.name,), daemon=True, name=f"owner of {node.name}").start()

    def close(self) -> None:
        """Nobody is asked any more."""
        self._ended.set()

    def sights(self) -> Mapping[str, tuple[House, float]]:
        """Node -> its newest word, and when it came. A node that never spoke is missing."""
        now_s = time.monotonic()
        for name, status in self._statuses().items():
            at_s = now_s - status.heard_s
            # A stream that has ended keeps its last line, which is older than the answer to a question.
            if status.house is not None and at_s > self._sights.get(name, (None, -math.inf))[1]:
                self._sights[name] = status.house, at_s
        return dict(self._sights)

    def _ask(self, name: str) -> None:
        with Fleet(self._cluster.only((name,))) as fleet:
            while not self._ended.wait(ASK_S):
                _, heard_s = self._sights.get(name, (None, 0.0))
                if time.monotonic() - heard_s < ASK_S or self._is_lent(name):
                    continue
                try:
                    answers, _ = fleet.ask("house", house.request(self._cluster.node(name), self._run), names=[name])
                    if name in answers:
                        self._sights[name] = read(House, answers[name]), time.monotonic()
                except Exception as error:  # noqa: BLE001 - no processes or no disk on this machine for a while: it is asked again
                    self._failed(f"{name} could not be asked whether its owner is there: {error!r}")
