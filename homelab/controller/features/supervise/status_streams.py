"""Following an attempt on all its nodes at once: one open connection per node, each with the line that came last."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from pydantic import ValidationError

from homelab.controller.attempt.watchdog import UNHEARD_S, NodeStatus
from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.reading import read
from homelab.controller.remote.agent import Agent, connect
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import process_owner
from homelab.shared.protocol.run_requests import FollowRequest

_AGAIN_S = 1.0
# A follower that gets no processor for a while beside its rank is heard again sooner than a new one would come to its first word.
_PATIENCE_S = 30.0
# While a run is recovered machines are busy with ending and starting it: a little more than for a verdict.
_GONE_S, _LOOK_S = UNHEARD_S + 3.0, 0.5


class StatusStreams:
    """A context manager. Nodes that cannot be reached are tried again and again, each in a thread of its own."""

    def __init__(self, cluster: Cluster, run: str, attempt: int, names: list[str]) -> None:
        self._cluster = cluster
        self._request = FollowRequest(run=run, attempt=attempt, by=process_owner.name(), process=process_owner.mark())
        self._statuses: dict[str, tuple[NodeStatus, float]] = {}
        self.fault: Exception | None = None
        """An error of ours that has ended such a thread: from then on its node looks silent, whatever it says."""
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._follow, args=(name,), daemon=True, name=f"follow {name}") for name in names]

    def __enter__(self) -> StatusStreams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The threads are daemons: one that waits for a node without power must not hold up the recovery.
        self._ended.set()

    def statuses(self) -> dict[str, NodeStatus]:
        """Each node's last line; `heard_s` says how old it is. Nodes that never spoke are missing."""
        now = time.monotonic()
        return {name: sign.replace(heard_s=now - at) for name, (sign, at) in list(self._statuses.items())}

    @contextlib.contextmanager
    def letting_go(self, fleet: Fleet) -> Iterator[None]:
        """In this block `fleet` gives up a node that falls silent, so that a question to it does not wait for long."""
        ended = threading.Event()

        def watch() -> None:
            closed: set[str] = set()
            while not ended.wait(_LOOK_S):
                for name in [name for name, sign in self.statuses().items() if sign.heard_s > _GONE_S and name not in closed]:
                    closed.add(name)
                    fleet.give_up(name, f"it has sent nothing for {_GONE_S:.0f} s")

        thread = threading.Thread(target=watch, daemon=True, name="letting go")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def wait(self, timeout_s: float) -> None:
        """Until a node says something, at most `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def _follow(self, name: str) -> None:
        try:
            while not self._ended.is_set():
                self._follow_once(name)
                self._ended.wait(_AGAIN_S)
        except Exception as error:  # noqa: BLE001 - whoever watches raises it
            self.fault = error

    def _follow_once(self, name: str) -> None:
        agent: Agent | None = None
        try:
            node = self._cluster.node(name)
            agent, request = connect(self._cluster, node), self._request.replace(yield_to=node.yield_to, yield_when=node.yield_when)
            try:
                stream = agent.open("follow", request)
            except HomelabError:
                agent.ask("free-port")  # ships the code where it is missing; a stream cannot
                stream = agent.open("follow", request)
            try:
                while not self._ended.is_set():
                    line = stream.readline(_PATIENCE_S)
                    if not line:
                        break
                    self._heard(name, line)
                    stream.write(b"\n")  # a node that hears no other machine and does no step stops itself
            finally:
                stream.close()
        except (HomelabError, OSError):
            pass  # tried again; that nothing is heard is all that counts
        finally:
            if agent is not None:
                with contextlib.suppress(Exception):
                    agent.close()

    def _heard(self, name: str, line: bytes) -> None:
        try:
            sign = read(NodeStatus, decoded(line))
        except (ValueError, ValidationError):  # half a line, or not our agent's: as if nothing had been said
            return
        with self._changed:
            self._statuses[name] = (sign, time.monotonic())
            self._changed.notify_all()
