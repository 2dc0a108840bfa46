"""The process that holds a run and is stopped by a signal (SIGSTOP, Ctrl-Z): its lock stays, and nobody else may act until somebody lets it go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from homelab.controller.base.hint import Hint
from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.node_commands import on_node
from homelab.controller.run import process_owner, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.owner_messages import Owner
from homelab.shared.protocol.run_messages import SupervisorReply

_WHO = {"recovering by hand": "homelab recover", "launching": "homelab launch"}


@dataclass(frozen=True)
class StoppedHolder:
    """`who`: the supervisor, or the command that acts in its place."""

    who: str
    pid: int

    @property
    def is_stopped(self) -> str:
        """That it is, as a sentence without an end."""
        return f"{self.who}, process {self.pid} on this machine, is stopped (SIGSTOP or Ctrl-Z)"

    @property
    def go_on(self) -> str:
        """The command that lets it go on."""
        return f"kill -CONT {self.pid}"


def here(paths: RunPaths) -> StoppedHolder | None:
    """None where nobody holds the run on this machine, or its holder is at work."""
    if not supervisor_lock.is_held(paths):
        return None
    record = store.read_object(paths.supervisor_json)
    pid = record.get("pid")
    if not isinstance(pid, int) or not process_owner.is_stopped(pid):
        return None
    return StoppedHolder(_WHO.get(str(record.get("doing")), "the supervisor"), pid)


def note(cluster: Cluster, paths: RunPaths, on_nodes: Mapping[str, SupervisorReply], owners: Iterable[Owner] = ()) -> Hint | None:
    """What it is, and the command that lets it go on; None where no owner is seen that is stopped. `on_nodes`: node -> its supervisor of this run."""
    holder = here(paths)
    if holder is not None:
        return Hint("{}: {}", holder.is_stopped, holder.go_on)
    for name, reply in on_nodes.items():
        if reply.alive and reply.frozen and reply.pid is not None:
            return Hint(
                "the supervisor, process {} on {}, is stopped (SIGSTOP): {}",
                reply.pid,
                name,
                on_node(cluster.node(name), f"kill -CONT {reply.pid}"),
            )
    for claim in (owner.claim for owner in owners if owner.claim):
        if process_owner.lives_here(claim.process) and process_owner.is_stopped(claim.process.get("pid")):
            pid = claim.process["pid"]
            return Hint(
                "the command by which the run is {}, process {} on this machine, is stopped (SIGSTOP or Ctrl-Z): {}",
                claim.doing,
                pid,
                f"kill -CONT {pid}",
            )
    return None
