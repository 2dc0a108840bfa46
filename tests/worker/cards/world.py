"""Hosts and their cards in virtual time: one thread for each rank, of which one runs at a time, always the one that is earliest. No card, no clock.

A card has streams. What a host puts on a stream begins when what is before it there has ended, and what it depends on. A message or a collective is
one operation on each card that takes part: it begins when all have begun it. A host that waits for something that cannot come any more is a
deadlock, which is raised on every rank with what each one waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

LIMIT_S = 30.0  # of real time: a fault of this file, not of what is played


class Deadlock(Exception):
    """No host can go on; the reason of each."""


@dataclass(eq=False)
class Operation:
    """One thing on a stream. `parts`: how many cards take part in it; `meeting`: the operations of those that are here already, this one too."""

    rank: int
    name: str
    asked_s: float
    seconds: float
    after: list[Operation]
    parts: int = 1
    meeting: list[Operation] = field(default_factory=list)
    is_on_card: bool = True
    behind: list[Operation] = field(default_factory=list)
    missing: int = 0  # of those before it, so many have not ended
    ready_s: float = 0.0  # when all others of those before it have ended
    begin_s: float | None = None  # when nothing is before it any more; None while that is not known
    end_s: float | None = None


@dataclass
class Host:
    """One rank's Python: its time, and what it waits for. `ready` gives the time at which that is over, or None."""

    rank: int
    now_s: float = 0.0
    reason: str = ""
    ready: Callable[[], float | None] = lambda: 0.0
    turn: threading.Event = field(default_factory=threading.Event)
    has_ended: bool = False


class World:
    """`size` hosts with a card each."""

    def __init__(self, size: int) -> None:
        self.hosts = [Host(rank) for rank in range(size)]
        self.operations: list[list[Operation]] = [[] for _ in range(size)]
        self._last: dict[tuple[int, object], Operation] = {}
        self._deadlock: str | None = None
        self._local = threading.local()
        self._error: BaseException | None = None

    @property
    def here(self) -> Host:
        """The host whose thread this is."""
        host: Host = self._local.host
        return host

    @property
    def is_here(self) -> bool:
        """Whether this thread is that of a host."""
        return hasattr(self._local, "host")

    def sleep(self, seconds: float) -> None:
        """The host does nothing for so long."""
        end_s = self.here.now_s + seconds
        self.wait("the end of a sleep", lambda: end_s)

    def play(self, program: Callable[[int], None]) -> None:
        """Run `program(rank)` on every host to its end. Raises Deadlock, or the first error of a program."""
        threads = [threading.Thread(target=self._run, args=(host, program), daemon=True) for host in self.hosts]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the stand-in itself hangs"
        if self._error is not None:
            raise self._error

    def _run(self, host: Host, program: Callable[[int], None]) -> None:
        self._local.host = host
        host.turn.wait()
        try:
            if self._deadlock is None:
                program(host.rank)
        except BaseException as error:
            self._error = self._error or error
        host.has_ended = True
        self._pass_on()

    def wait(self, reason: str, ready: Callable[[], float | None]) -> None:
        """The host waits until `ready` gives a time, and it is then at least that late. Others that are earlier run first."""
        host = self.here
        host.reason, host.ready = reason, ready
        host.turn.clear()
        self._pass_on()
        host.turn.wait()
        if self._deadlock is not None:
            raise Deadlock(self._deadlock)

    def _pass_on(self) -> None:
        """Let the earliest host that can go on go on."""
        waiting = [host for host in self.hosts if not host.has_ended]
        times = [(max(host.now_s, ready_s), host) for host in waiting if (ready_s := host.ready()) is not None]
        if times and self._deadlock is None:
            now_s, host = min(times, key=lambda pair: (pair[0], pair[1].rank))
            host.now_s = now_s
            host.ready = lambda: 0.0
            host.turn.set()
        elif waiting:
            self._deadlock = self._deadlock or "; ".join(f"rank {host.rank}: {host.reason}" for host in waiting)
            waiting[0].ready = lambda: 0.0
            waiting[0].turn.set()

    def enqueue(self, stream: object, operation: Operation) -> Operation:
        """Put it on a stream of this host's card, behind what is there."""
        before = self._last.get((operation.rank, stream))
        if before is not None:
            operation.after.append(before)
        self._last[operation.rank, stream] = operation
        self.operations[operation.rank].append(operation)
        operation.ready_s = operation.asked_s
        for earlier in operation.after:
            if earlier.end_s is None:
                earlier.behind.append(operation)
                operation.missing += 1
            else:
                operation.ready_s = max(operation.ready_s, earlier.end_s)
        operation.after.clear()
        self._begin(operation)
        return operation

    @staticmethod
    def _begin(operation: Operation) -> None:
        """Work out the ends that are known when this one begins, and let begin what was behind them."""
        waiting = [operation]
        for one in waiting:
            if one.missing or one.begin_s is not None:
                continue
            one.begin_s = one.ready_s
            together = one.meeting or [one]
            begins = [other.begin_s for other in together if other.begin_s is not None]
            if len(begins) < one.parts:
                continue
            end_s = max(begins) + one.seconds
            for other in together:
                other.end_s = end_s
                for later in other.behind:
                    later.missing -= 1
                    later.ready_s = max(later.ready_s, end_s)
                    waiting.append(later)

    def last(self, stream: object) -> list[Operation]:
        """What is behind all else on a stream of this host's card: one operation, or none."""
        operation = self._last.get((self.here.rank, stream))
        return [operation] if operation is not None else []

    def wait_for(self, operations: list[Operation], reason: str) -> None:
        """The host waits until they have ended."""

        def ready() -> float | None:
            latest_s = 0.0
            for operation in operations:
                if operation.end_s is None:
                    return None
                latest_s = max(latest_s, operation.end_s)
            return latest_s

        self.wait(reason, ready)
