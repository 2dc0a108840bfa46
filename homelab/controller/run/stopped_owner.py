"""The owner of a run that is stopped by a signal (SIGSTOP, Ctrl-Z): it holds the run and does nothing, until somebody lets it go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from homelab.controller.base.hint import Hint
from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.node_commands import on_node
from homelab.controller.run import process_owner, stopped_holder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.owner_messages import Owner
from homelab.shared.protocol.run_messages import SupervisorReply


def note(cluster: Cluster, paths: RunPaths, on_nodes: Mapping[str, SupervisorReply], owners: Iterable[Owner] = ()) -> Hint | None:
    """What it is, and the command that lets it go on; None where no owner is seen that is stopped. `on_nodes`: node -> its supervisor of this run."""
    holder = stopped_holder.here(paths)
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
