"""Asks every node at once: results and errors by node name, in the time of the slowest node."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.interpreter import for_recipe
from homelab.controller.config.recipe import Recipe
from homelab.controller.remote.agent import Agent, Asked, connect

RETRY_AFTER_S = 5.0

T = TypeVar("T")
Outcome = tuple[dict[str, T], dict[str, HomelabError]]


def on_all(names: Iterable[str], work: Callable[[str], T], *, stop: Callable[[], object] | None = None) -> Outcome[T]:
    """Run `work(name)` for all names in parallel. A HomelabError is that node's outcome; any other error is ours and is raised.

    Ctrl-C waits for the work that goes on; `stop` is called before, to end work that can last for minutes.
    """
    results: dict[str, T] = {}
    errors: dict[str, HomelabError] = {}
    names = list(names)
    if not names:
        return results, errors
    with ThreadPoolExecutor(max_workers=min(32, len(names)), thread_name_prefix="node") as pool:
        try:
            futures = {name: pool.submit(work, name) for name in names}
            for name, future in futures.items():
                try:
                    results[name] = future.result()
                except HomelabError as error:
                    errors[name] = error
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            if stop:
                stop()
            raise
    return results, errors


class Fleet:
    """The agents of a cluster: connected in parallel, kept open, asked in parallel. A context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._agents: dict[str, Agent] = {}
        self._silent: dict[str, tuple[float, UnreachableError]] = {}
        self._given_up: dict[str, UnreachableError] = {}
        self.is_closed = False
        """A thread that still asks opens connections anew; it can close them by another `__exit__`."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True
        # A thread that still asks may connect to another node meanwhile: a loop over the agents would end with an error, and the supervisor with it.
        while self._agents:
            try:
                agent = self._agents.popitem()[1]
            except KeyError:  # the thread has given the last one up
                break
            agent.close()

    def only(self, names: Iterable[str]) -> Fleet:
        """These nodes alone, over the same connections (close the whole fleet, not the part)."""
        part = Fleet(self.cluster.only(tuple(names)))
        part._agents, part._silent, part._given_up = self._agents, self._silent, self._given_up
        return part

    def train_with(self, recipe: Recipe) -> None:
        """From now on ask the Python that trains this recipe, over the same connections."""
        self.cluster = for_recipe(self.cluster, recipe)
        for node in self.cluster.nodes:
            if node.name in self._agents:
                self._agents[node.name].node = node

    def agent(self, name: str) -> Agent:
        """This node's agent, connected when it was not. Raises UnreachableError.

        A node that could not be reached is not tried again for `RETRY_AFTER_S`: a command asks several questions, and a node
        without power costs the whole connect time-out each time.
        """
        agent = self._agents.get(name)
        if agent is not None:
            return agent
        failed_at, error = self._silent.get(name, (-math.inf, None))
        if error is not None and time.monotonic() - failed_at < RETRY_AFTER_S:
            raise error
        self._refuse_given_up(name)
        try:
            agent = connect(self.cluster, self.cluster.node(name))
        except UnreachableError as refused:
            self._silent[name] = (time.monotonic(), refused)
            raise
        self._agents[name] = agent
        self._refuse_given_up(name)
        return agent

    def give_up(self, name: str, because: str) -> None:
        """End what is being asked of this node, from another thread, and ask it nothing any more: it would be waited for in vain."""
        self._given_up[name] = UnreachableError(because, where=f"node {name}", hint=homelab("preflight --only ssh"))
        self._drop(name)

    def give_up_all(self) -> None:
        """The same for all nodes, because the user has pressed Ctrl-C."""
        for node in self.cluster.nodes:
            self.give_up(node.name, "stopped by Ctrl-C")

    def on_all_until_stopped(self, names: Iterable[str], work: Callable[[str], T]) -> Outcome[T]:
        """`on_all` of work that lasts for minutes and that Ctrl-C ends at once. Afterwards the nodes can be asked again: who has claimed a run releases it."""
        before = dict(self._given_up)
        try:
            return on_all(names, work, stop=self.give_up_all)
        except KeyboardInterrupt:
            self._given_up.clear()
            self._given_up.update(before)
            raise

    def _refuse_given_up(self, name: str) -> None:
        if name in self._given_up:
            self._drop(name)
            raise self._given_up[name]

    def _drop(self, name: str) -> None:
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.close()

    def ask(
        self, verb: str, request: Asked | Callable[[Node], Asked] = None, *,
        names: Iterable[str] | None = None, timeout_s: float = 20.0,
    ) -> Outcome[dict[str, Any]]:  # fmt: skip
        """One question to many nodes (all of them by default); a broken connection is opened anew next time."""

        def one(name: str) -> dict[str, Any]:
            node = self.cluster.node(name)
            body = request(node) if callable(request) else request
            try:
                return self.agent(name).ask(verb, body, timeout_s=timeout_s)
            except UnreachableError:
                self._drop(name)
                raise

        return on_all([node.name for node in self.cluster.nodes] if names is None else names, one)
