"""Do the ranks that can be seen go on, though not every node answers? No step ends without all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from homelab.controller.attempt import watchdog
from homelab.shared.protocol.run_messages import Reply

# (phase, step) of one rank, in the order in which they were seen.
Track = list[tuple[str, int]]
# Work that had begun when a peer became silent still ends: one step and the work after it. More than that needs all ranks.
_ECHOES = 2


class ProgressTracker:
    """Whether the ranks of some nodes go on, from one look at them after the other. Pure.

    `step_s`: how long a step takes, if known; `planned_s`: how long the plan expects it to take.
    """

    def __init__(self, step_s: float | None, planned_s: float | None = None) -> None:
        self._step_s, self._planned_s = step_s, planned_s
        self._tracks: dict[tuple[str, int], Track] = {}
        self._since: dict[tuple[str, int], float] = {}
        self.wait_s = 0.0
        """How long the rank that may stand still longest may still do so; 0 or less when it is clear that nobody moves."""

    def see(self, replies: Iterable[Reply], now_s: float) -> None:
        """`now_s` is monotonic: a node's own clock counts for the first look alone, because it may jump."""
        self.wait_s = 0.0
        for reply in replies:
            for number, rank in reply.run.ranks.items() if reply.run and reply.run.is_alive else ():
                beat, key = rank.heartbeat, (reply.node, number)
                if beat is None or beat.phase == "done":
                    continue
                limit_s = watchdog.limit_s(beat.phase, self._step_s, "cut", self._planned_s)
                track = self._tracks.setdefault(key, [])
                if not track or track[-1] != (beat.phase, beat.step):
                    age_s = 0.0 if track else min(max(reply.time - beat.time, 0.0), limit_s)
                    track.append((beat.phase, beat.step))
                    self._since[key] = now_s - age_s
                self.wait_s = max(self.wait_s, self._since[key] + limit_s - now_s)

    @property
    def moves(self) -> bool:
        """A rank has done more than what was on its way when it was first looked at."""
        return any(sum(max(1, later[1] - earlier[1]) for earlier, later in pairwise(track)) > _ECHOES for track in self._tracks.values())

    @property
    def step(self) -> int:
        """The newest that was seen."""
        return max((track[-1][1] for track in self._tracks.values()), default=0)
