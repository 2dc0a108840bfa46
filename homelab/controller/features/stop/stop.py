"""Stop: end a run on every node, and look again until nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.attempt import remote_supervisor, start
from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNREACHABLE, HomelabError, StoppedError, SupersededError, TakenError
from homelab.controller.facts.node_commands import RESTART_IN_WORDS
from homelab.controller.features.status import monitor
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import (
    claims,
    event_log,
    node_matching,
    ownership,
    run_folder,
    run_lookup,
    stopped_holder,
    store,
    supervisor_lock,
)
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths


@dataclass(frozen=True)
class StopOutcome:
    """What a stop did on each node."""

    run: str
    ended: dict[str, dict[str, Any]]
    unreachable: dict[str, HomelabError]
    was_done: bool = False  # before anything was asked: there is nothing to go on with
    held: str = ""  # who holds the run here and cannot see that it was stopped

    @property
    def left(self) -> dict[str, list[int]]:
        """Processes that even SIGKILL did not end, by node."""
        return {node: answer["left"] for node, answer in self.ended.items() if answer["left"]}

    @property
    def exit_code(self) -> int:
        """0 when verified on every node, 1 when something is left, 3 when a node could not be asked."""
        return EXIT_FAILED if self.left else EXIT_UNREACHABLE if self.unreachable else EXIT_DONE

    def lines(self, options: str = "") -> list[str]:
        """For people. `options`: of a following command, as shell text."""
        lines = []
        for name, answer in self.ended.items():
            then = [part for part in answer.get("as_nodes", ()) if part != name]
            node = f"{name} ({', '.join(then)} in this run)" if then else name
            if answer["left"]:
                lines.append(
                    f"{node}: processes {', '.join(map(str, answer['left']))} do not end (stuck in the driver?); on the node: {RESTART_IN_WORDS}"
                )
            elif answer["asked"]:
                killed = f", {answer['killed']} had to be killed" if answer["killed"] else ""
                lines.append(f"{node}: {answer['asked']} processes ended{killed}; verified, nothing is left")
            else:
                lines.append(f"{node}: nothing was running; verified")
        if self.held:
            lines.append(self.held)
        for node, error in self.unreachable.items():
            lines.append(
                f"{node}: could not be asked ({error.message}); it may still be running. When it is back: homelab stop {self.run}{options}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {
            "run": self.run,
            "nodes": self.ended,
            "unreachable": {node: error.as_dict() for node, error in self.unreachable.items()},
            "clean": self.exit_code == EXIT_DONE,
            **({"held": self.held} if self.held else {}),
        }


def stop(fleet: Fleet, paths: RunPaths, say: Callable[[str], None]) -> StopOutcome:
    """End the run on all nodes of the cluster that its plans name (an earlier attempt may have left something elsewhere)."""
    attempt = run_folder.plan_of(paths).attempt
    before = store.read_object(paths.state_json).get("state")
    # A look, and a start that failed, write "failed" while a supervisor still tries: it has to hear of the stop.
    is_over = before == "done" or (before == "failed" and not supervisor_lock.is_held(paths))
    if not is_over:
        store.set_state(paths, "stopping", attempt, intent="stopping")
    planned = {node.name: node for number in range(1, attempt + 1) for node in _plan_nodes(paths, number)}
    remote_supervisor.end(fleet, paths, say)
    say(f"stopping {paths.name} on {', '.join(planned)}")
    # All nodes: one of them may be a node of the run by another name, or be about to take part in a recovery that is under way.
    hosts = {node.name: node.host for node in fleet.cluster.nodes}
    workdirs = {name: node.workdir for name, node in planned.items()}
    answers, errors = start.stop_all(fleet, paths.name, list(hosts), start.BY_HAND, workdirs=workdirs)
    unreachable = node_matching.unseen({name: _host_then(paths, name) for name in planned}, answers, errors, hosts)
    ended = {
        name: answer
        for name, answer in answers.items()
        if (name in planned or answer["as_nodes"] or answer["asked"]) and name not in unreachable
    }
    holder = stopped_holder.here(paths)
    held = f"{holder.is_stopped}, and does not notice this; it ends by itself after {holder.go_on}" if holder else ""
    outcome = StopOutcome(paths.name, ended, unreachable, was_done=before == "done", held=held)
    if not is_over:
        store.set_state(paths, "stopped" if outcome.exit_code == EXIT_DONE else "stopping", attempt)
    event_log.append(paths, event("stopped", attempt, clean=outcome.exit_code == EXIT_DONE, nodes=sorted(ended)))
    return outcome


def _host_then(paths: RunPaths, name: str) -> str:
    """The address of a node when the run was launched, empty where it was not recorded."""
    nodes = store.read_object(paths.cluster_json).get("nodes")
    entries = [node for node in nodes if isinstance(node, dict) and node.get("name") == name] if isinstance(nodes, list) else []
    return str(entries[0].get("host") or "") if entries else ""


def _plan_nodes(paths: RunPaths, number: int) -> list[Any]:
    try:
        return list(run_folder.plan_of(paths, number).nodes)
    except HomelabError:
        return []


def end_rest(fleet: Fleet, paths: RunPaths) -> list[str]:
    """Nothing is done where somebody else owns the run, or has gone on with it. The nodes on which something may be left."""
    with suppress(TakenError, StoppedError, SupersededError), supervisor_lock.held(paths) as is_ours:
        watcher = monitor.Watcher(fleet, paths, is_owner=True)
        state, attempt = watcher.look().state, run_folder.plan_of(paths).attempt
        if not is_ours or not ownership.may_end("starter", state, watcher.owner):
            return []
        names = [node.name for node in run_folder.plan_of(paths).nodes if node.name not in watcher.unreachable]
        with claims.claimed(fleet, paths.name, names, "ended after its failure", after=attempt) as claim:
            stopped, errors = start.stop_all(fleet, paths.name, names, claim.as_request(), grace_s=3.0)
        return [*(name for name, answer in stopped.items() if answer["left"]), *errors]
    return []


def end_orphans(
    fleet: Fleet, runs_dir: Path, say: Callable[[str], None]
) -> tuple[list[StopOutcome], list[str], dict[str, HomelabError], list[str]]:
    """End them on every node: (what was ended, the runs that live and were left alone, the nodes that could not be asked, what else was repaired).

    A run that trains is left alone, and so is one that somebody owns: a supervisor, here or anywhere, or a command.
    """
    say("reading the runs of the nodes")
    answers, unreachable = fleet.ask("runs")
    repaired = event_log.tell_secrets_removed(runs_dir, answers)
    ended, kept = [], []
    for name in sorted({entry["name"] for answer in answers.values() for entry in answer["runs"] if entry["alive"]}):
        try:
            paths = run_lookup.run(fleet, runs_dir, name, say)
            watcher = monitor.Watcher(fleet, paths)
            is_orphaned = ownership.is_orphaned(watcher.look().state, watcher.owner)
        except HomelabError as error:  # one whose folder is damaged keeps no other alive
            say(f"{name} is left alone: {error}")
            is_orphaned = False
        if is_orphaned:
            ended.append(stop(fleet, paths, say))
        else:
            kept.append(name)
    return ended, kept, unreachable, repaired
