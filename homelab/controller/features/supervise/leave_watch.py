"""Which nodes of a run are with their owners: read from the folder beside the runs, and told in the run's events when it changes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from homelab.controller.run import event_log, leave, leave_folder
from homelab.controller.run.events import event, given_back
from homelab.controller.run.leave import LeaveClock
from homelab.controller.run.paths import RunPaths


class LeaveWatch:
    """Of the nodes that a run may use. `free` are those on which nothing of it runs now: they are really their owners'."""

    def __init__(self, paths: RunPaths, names: Collection[str]) -> None:
        lines = event_log.lines(paths)
        self._paths, self._names = paths, frozenset(names)
        self._told = leave.lasting(lines)
        self._lent = leave.lent(lines)
        self._known: Mapping[str, leave.Leave] = {}
        self._clock = LeaveClock()
        self.away: Mapping[str, str] = {}
        """Node -> until when, "" without an end; as seen last."""

    @property
    def lent(self) -> frozenset[str]:
        """Nodes that were given back and have not trained since."""
        return frozenset(self._lent)

    def look(self, attempt: int, free: Collection[str]) -> Mapping[str, str]:
        """Node -> until when, of those that are with their owners, or are wanted by them."""
        now = time.time()
        self._known = leave_folder.read(self._paths.root.parent, self._known)
        lasting = self._clock.lasting(self._known.values(), now, time.monotonic())
        self.away = {name: one.until_words(now) for name, one in lasting.items() if name in self._names}
        for name in [name for name in self._told if name not in self.away]:
            del self._told[name]
            event_log.append(self._paths, event("came-back", attempt, node=name))
        for name, until in self.away.items():
            if name in free and self._told.get(name) != until:
                self._told[name] = until
                self._lent.add(name)
                event_log.append(self._paths, given_back(attempt, name, until))
        return self.away

    def took_part(self, names: Collection[str]) -> None:
        """These train again."""
        self._lent.difference_update(names)
