"""What a supervisor sees of the attempt that it follows: the verdict on it, its newest checkpoint, and the left-out nodes that are well again."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack

from homelab.controller.attempt import watchdog
from homelab.controller.attempt.watchdog import NodeStatus, common_checkpoint
from homelab.controller.features.supervise.observation import Save
from homelab.controller.features.supervise.recut_watch import RecutWatch
from homelab.controller.features.supervise.rejoin import RejoinMonitor
from homelab.controller.features.supervise.status_streams import StatusStreams
from homelab.controller.features.supervise.step_durations import StepTimeWindow
from homelab.controller.planning.types import Plan
from homelab.shared.protocol import phases
from homelab.shared.protocol.rank_messages import DEAD

ENDS: frozenset[watchdog.Kind] = frozenset({"exit", "dead-rank"})
# Events shortly after the first sign of a failure belong to it: the ends of the other ranks and their last lines.
SETTLE_S, SETTLE_MOST_S = 0.7, 6.0
_LONGEST_WAIT_S = 0.2


class AttemptWatch:
    """A context manager. `sees_ranks` is False for a [script], of which only the end can be seen. `monitor` asks the nodes that were left out,
    `recut` those of a pipeline for what they have measured."""

    def __init__(
        self,
        plan: Plan,
        streams: StatusStreams,
        step_times: StepTimeWindow,
        *,
        sees_ranks: bool,
        monitor: RejoinMonitor | None = None,
        recut: RecutWatch | None = None,
    ) -> None:
        self.streams = streams
        self._plan = plan
        self._names = [node.name for node in plan.nodes]
        self._step_times = step_times
        self._sees_ranks = sees_ranks
        self._monitor = monitor
        self._recut = recut
        self._open = ExitStack()

    def __enter__(self) -> AttemptWatch:
        self._open.enter_context(self.streams)
        if self._monitor is not None:
            self._open.enter_context(self._monitor)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def well(self) -> frozenset[str]:
        """Nodes that were left out and are well again."""
        return self._monitor.well if self._monitor is not None else frozenset()

    @property
    def step(self) -> int:
        """The newest that a rank has done."""
        return max((rank.step for status in self._statuses().values() for rank in status.ranks.values()), default=0)

    @property
    def save(self) -> Save:
        """Whether a checkpoint can be asked for: not of a program of one's own, and before the first step there is nothing to save."""
        if not self._sees_ranks:
            return "none"
        statuses = self._statuses()
        if not set(self._names) <= set(statuses):
            return "unknown"
        begun = {rank.phase for status in statuses.values() for rank in status.ranks.values()} - phases.BEFORE_TRAINING
        return "asked" if begun else "none"

    @property
    def recut(self) -> str:
        """Why another cut of the model pays from the newest checkpoint on; "" where none does."""
        return self._recut.because if self._recut is not None else ""

    def stop_asking(self) -> None:
        """The nodes that were left out are not asked any more."""
        if self._monitor is not None:
            self._monitor.__exit__()

    def wait(self) -> None:
        """Until a node says something, for a moment at most."""
        self.streams.wait(_LONGEST_WAIT_S)

    def look(self) -> tuple[watchdog.AttemptVerdict, int]:
        """The verdict, and the newest checkpoint that all nodes hold. Of an end the watchdog is asked again when torchrun has said its own word.

        Raises the error of ours that has ended a thread by which it sees.
        """
        if self.streams.fault is not None:
            raise self.streams.fault
        statuses = self._statuses()
        self._step_times.see(statuses, time.monotonic())
        checkpoint = common_checkpoint(statuses)
        if self._recut is not None:
            self._recut.see(statuses, checkpoint)
        verdict = self._judge(statuses)
        if verdict.kind not in ENDS:
            return verdict, checkpoint
        self.settle(verdict.nodes)
        statuses = self._statuses()
        return watchdog.confirmed(verdict, self._judge(statuses), statuses), checkpoint

    def settle(self, names: Collection[str] = ()) -> None:
        """Wait until torchrun on these nodes has said how its ranks ended, which takes longer on a busy machine; not for long. Where the agent
        was killed nobody writes it down."""
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < SETTLE_MOST_S:
            statuses = self.streams.statuses()
            ended = {name for name, status in statuses.items() if status.exit is not None}
            if ended.issuperset(self._names):
                return
            ended |= {name for name, status in statuses.items() if status.started and status.agent in DEAD}
            if passed_s >= SETTLE_S and ended.issuperset(name for name in names if name in statuses):
                return
            self.streams.wait(0.1)

    def _judge(self, statuses: dict[str, NodeStatus]) -> watchdog.AttemptVerdict:
        return watchdog.judge(self._plan.attempt, self._names, statuses, self._step_times.step_s, self._plan.step_s)

    def _statuses(self) -> dict[str, NodeStatus]:
        statuses = self.streams.statuses()
        if self._sees_ranks:
            return statuses
        return {name: status.replace(ranks={}) for name, status in statuses.items()}
