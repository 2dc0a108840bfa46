"""Starting a run's supervisor: a process of its own that outlives this terminal, on this machine or on the head node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from homelab.control import head_supervisor
from homelab.control.head_supervisor import Place
from homelab.errors import HomelabError
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import lock, store
from homelab.runs.paths import RunPaths

_START_S = 30.0
Where = Literal["here", "head", "no"]
Say = Callable[[str], None]


class Supervision:
    """Where a run is to have its supervisor. A head that is this machine itself (`host = "local"`) is here."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._place: Place | None = None

    @contextmanager
    def tried(
        self, fleet: Fleet, run: str, head: str, nodes: Collection[str], addresses: Mapping[str, str], say: Say, silent: Collection[str] = ()
    ) -> Iterator[None]:
        """Around the start of the training: raises HomelabError before it where the head cannot have the supervisor.

        `nodes` are those it may use, `addresses` theirs on the LAN, as far as they are known; those that are `silent` may come back.
        """
        if self._where == "head" and fleet.cluster.node(head).host != "local":
            self._place = head_supervisor.prepare(fleet, run, head, nodes, addresses, say, silent)
        try:
            yield
        except BaseException:
            self._discard(fleet)
            raise

    def rehearse(self, fleet: Fleet, plan: Plan, say: Say) -> None:
        """Raise what `tried` would raise before this plan is started; nothing is left of it."""
        addresses = {node.name: node.lan_address for node in plan.nodes}
        with self.tried(fleet, plan.run, plan.head, list(addresses), addresses, say):
            self._discard(fleet)

    def _discard(self, fleet: Fleet) -> None:
        if self._place is not None:
            head_supervisor.discard(fleet, self._place)

    def leave(self, fleet: Fleet, paths: RunPaths, cluster_file: Path, nodes: Collection[str], say: Say) -> str:
        """Start it; what a person may want to know of it, empty where that is nothing. Raises HomelabError; the run itself goes on."""
        if self._where == "no":
            return ""
        place, self._place = self._place, None  # it is not taken away any more, whatever follows
        if place is not None:
            log = head_supervisor.start(fleet, paths, place, say)
            return f"on {place.node}, whatever becomes of this machine; its log there: {log}"
        with store.told(paths.supervised_json):
            paths.supervised_json.unlink(missing_ok=True)
        start(paths, cluster_file, nodes)
        return ""


def start(paths: RunPaths, cluster_file: Path, nodes: Collection[str]) -> None:
    """Start the supervisor of a run on `nodes`, which are those it may use, unless it has one.

    Raises HomelabError when it does not come up; the run itself goes on.
    """
    if lock.is_held(paths):
        return
    command = [
        sys.executable, "-m", "homelab", "supervise", paths.name,
        "--nodes", ",".join(nodes), "--cluster", str(cluster_file.resolve()), "--runs-dir", str(paths.root.parent.resolve()),
    ]  # fmt: skip
    # A node's name may hold letters that this locale has not (LC_ALL=C): as bytes, and for a Python that reads them so.
    words = [word.encode("utf-8", "surrogateescape") for word in command]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    try:
        with paths.supervisor_log.open("ab") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=paths.root, env=environment)
    except (OSError, ValueError) as error:
        raise _not_started(paths, str(error)) from error
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if lock.is_held(paths):
            return
        time.sleep(0.05)
    if process.poll() == 0:  # it found nothing to do, or another one was quicker
        return
    process.kill()  # what is said not to run must not begin later
    said = paths.supervisor_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise _not_started(paths, said[0] if said else f"no answer within {_START_S:.0f} s")


def _not_started(paths: RunPaths, why: str) -> HomelabError:
    return HomelabError(
        f"the supervisor did not start: {why}",
        where=str(paths.supervisor_log),
        hint=f"the run goes on without it; by hand: homelab supervise {paths.name}, and after a failure: homelab recover {paths.name}",
    )
