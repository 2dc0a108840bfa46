"""Which nodes of a run are with their owners: by the folder beside the runs, where it is typed, and by what the nodes say. Told in the run's events."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.base import daily_hours, elapsed, redact
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.supervise import house_judge
from homelab.controller.features.supervise.house_judge import HouseJudge
from homelab.controller.features.supervise.house_monitor import HouseMonitor
from homelab.controller.run import event_log, leave, leave_folder, store
from homelab.controller.run.events import event, given_back, note
from homelab.controller.run.leave import Away, Leave, LeaveClock
from homelab.controller.run.paths import RunPaths

_SAME_S = 0.001  # when a line came is reckoned from its age, which rounds


class LeaveWatch:
    """Of the nodes that a run may use. `free` are those on which nothing of it runs now: they are really their owners'. `statuses`: of those that are
    followed. `freed` ends what waits for the next attempt on nodes that have just become their owners', in a thread of its own: their memory is wanted,
    too.
    """

    def __init__(
        self,
        paths: RunPaths,
        cluster: Cluster,
        statuses: Callable[[], Mapping[str, NodeStatus]],
        freed: Callable[[frozenset[str]], None] = lambda names: None,
    ) -> None:
        lines = event_log.lines(paths)
        self._freed = freed
        self._paths, self._names = paths, frozenset(node.name for node in cluster.nodes)
        self._told = leave.lasting(lines)
        self._lent = leave.lent(lines)
        self._known: Mapping[str, Leave] = leave_folder.read(paths.root.parent)
        self._clock = LeaveClock()
        self._typed: Mapping[str, Leave] = {}
        self._judged_s: dict[str, float] = {}
        self._judges = {node.name: self._judge(node.name, node.hours) for node in cluster.nodes}
        self._failures: set[str] = set()
        self._monitor = HouseMonitor(cluster, paths.name, statuses, lambda name: name in self._typed, self._tell_once)
        self.away: Mapping[str, Away] = {}
        """Node -> until when and why; as seen last."""

    @property
    def lent(self) -> frozenset[str]:
        """Nodes that were given back and have not trained since."""
        return frozenset(self._lent)

    def look(self, attempt: int, free: Collection[str]) -> Mapping[str, Away]:
        """Node -> until when and why, of those that are with their owners, or are wanted by them."""
        now = time.time()
        self._read()
        self._typed = self._clock.lasting(self._known.values(), now, elapsed.now_s())
        for name, (house, at_s) in self._monitor.sights().items():
            # Each once: of a node that a person has lent, and is not asked, the last one is older than the wish to have it back.
            if name in self._judges and at_s - self._judged_s.get(name, -math.inf) > _SAME_S:
                self._judged_s[name] = at_s
                self._judges[name].see(house, at_s)
                self._forget_overridden(name)
        seen = {name: judge.away for name, judge in self._judges.items() if judge.away is not None}
        typed = {name: Away(one.until_words(now)) for name, one in self._typed.items() if name in self._names}
        self.away = seen | typed
        for name in [name for name in self._told if name not in self.away]:
            del self._told[name]
            event_log.append(self._paths, event("came-back", attempt, node=name))
        if just_freed := frozenset(name for name in self.away if name in free and name not in self._told):
            threading.Thread(target=self._freed, args=(just_freed,), daemon=True, name="freed").start()
        for name, one in self.away.items():
            if name in free and self._told.get(name) != one:
                self._told[name] = one
                self._lent.add(name)
                event_log.append(self._paths, given_back(attempt, name, one.until, one.because))
        return self.away

    def took_part(self, names: Collection[str]) -> None:
        """These train again."""
        self._lent.difference_update(names)

    def _tell_once(self, failure: str) -> None:
        words = redact.text(plain_lines(failure))[:300]
        if words not in self._failures:
            self._failures.add(words)
            event_log.append(self._paths, note(words))

    def forget_overrides(self) -> None:
        """The run is over: for whoever uses a node later, each of its owner's signs counts again."""
        for name, one in leave_folder.read(self._paths.root.parent).items():
            if name in self._names and one.is_back and one.against:
                with store.best_effort_write(self._paths.root.parent):
                    leave_folder.write(self._paths.root.parent, one.model_copy(update={"against": ()}))

    def close(self) -> None:
        """Ask the nodes no more."""
        self._monitor.close()

    def _judge(self, name: str, hours: str) -> HouseJudge:
        before = self._told.get(name)
        return HouseJudge(
            daily_hours.spans(hours) if hours else (), house_judge.QUIET_S, before if before is not None and before.because else None,
            self._known[name].overridden(time.time()) if name in self._known else (),
        )  # fmt: skip

    def _read(self) -> None:
        """The wishes as they are now. Who has just taken a node back wants it whatever the node says."""
        before, self._known = self._known, leave_folder.read(self._paths.root.parent, self._known)
        for name, one in self._known.items():
            old = before.get(name)
            if one.is_back and (old is None or (old.since, old.is_back) != (one.since, True)) and name in self._judges:
                self._judges[name].take_back(one.against)

    def _forget_overridden(self, name: str) -> None:
        """A sign that has gone once counts again, also for a later supervisor."""
        one, ignored = self._known.get(name), self._judges[name].ignored
        if one is not None and one.is_back and not set(one.against) <= ignored:
            left = one.model_copy(update={"against": tuple(key for key in one.against if key in ignored)})
            self._known = {**self._known, name: left}
            with store.best_effort_write(self._paths.root.parent):
                leave_folder.write(self._paths.root.parent, left)
