"""Every run that this controller or a node knows, with a state for each from what the nodes say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.dashboard.run_list import RunRow
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder, store, supervisor_lock, supervisor_record
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED


@dataclass(frozen=True)
class RunIndex:
    """The newest run first; `unreachable` are the nodes that could not be asked."""

    rows: tuple[RunRow, ...]
    unreachable: dict[str, HomelabError]


@dataclass(frozen=True)
class NodeEntry:
    """What one node says of one run (`homelab.node.run.poll.runs`). `returncode` is None, too, for an attempt that could not even start."""

    attempt: int
    is_alive: bool
    has_final: bool
    has_ended: bool = False
    returncode: int | None = None
    was_stopped: bool = False
    is_owned: bool = False

    @classmethod
    def of(cls, entry: dict[str, Any]) -> NodeEntry:
        """From the node's answer."""
        end = entry["exit"] or {}
        return cls(
            entry["attempt"],
            bool(entry["alive"]),
            bool(entry["final"]),
            bool(end),
            end.get("returncode"),
            bool(end.get("stopped")),
            bool(entry["busy"]),
        )


def all_runs(fleet: Fleet, runs_dir: Path, say: Say) -> RunIndex:
    """Ask all nodes, and look into `runs_dir`."""
    say("reading the runs of the nodes")
    answers, unreachable = fleet.ask("runs")
    event_log.tell_secrets_removed(runs_dir, answers)
    rows = {row.name: row for row in kept_here(runs_dir)}
    entries: dict[str, dict[str, NodeEntry]] = {}
    for node, answer in answers.items():
        for entry in answer["runs"]:
            rows.setdefault(entry["name"], RunRow(entry["name"], "", 0, entry["created_at"]))
            entries.setdefault(entry["name"], {})[node] = NodeEntry.of(entry)
    judged = []
    for name, row in rows.items():
        on_nodes, paths = entries.get(name, {}), RunPaths(runs_dir / name)
        is_at_work = supervisor_lock.is_held(paths) or supervisor_record.is_under_way(store.read_object(paths.supervisor_json))
        if not on_nodes and row.state not in FINISHED and not is_at_work:
            row = replace(row, state="lost")  # no node that answers has it, and nobody here begins or recovers it
        judged.append(judge(replace(row, nodes=tuple(on_nodes)), on_nodes.values()))
    return RunIndex(newest_first(judged), unreachable)


def kept_here(runs_dir: Path) -> tuple[RunRow, ...]:
    """Those of `runs_dir`, as this machine saw them last."""
    rows = []
    for paths in store.runs_in(runs_dir):
        attempt = store.read_object(paths.state_json).get("attempt")
        number = attempt if isinstance(attempt, int) else 0
        rows.append(RunRow(paths.name, run_folder.state_of(paths), number, run_folder.created_at(paths) or None))
    return newest_first(rows)


def newest_first(rows: Iterable[RunRow]) -> tuple[RunRow, ...]:
    """In the order of their launches."""
    return tuple(sorted(rows, key=lambda row: row.created_at or 0.0, reverse=True))


def judge(row: RunRow, entries: Iterable[NodeEntry]) -> RunRow:
    """The row with a short state from what the nodes say; `homelab status` looks closer. Pure."""
    entries = list(entries)
    if not entries:
        return row
    newest = max(entry.attempt for entry in entries)
    if newest < row.attempt and row.state in FINISHED:  # the nodes that took part in the end are off now
        return row
    current = [entry for entry in entries if entry.attempt == newest]
    state = row.state
    # As in `homelab status`: an attempt with a recorded end is over, even if a person has started it by hand since.
    if any(entry.is_alive and not entry.has_ended for entry in current):
        state = "running"
    elif any(entry.has_final for entry in entries) or all(entry.returncode == 0 for entry in current):  # a [script] leaves no final model
        state = "done"
    elif any(entry.was_stopped for entry in current):
        state = "starting" if any(entry.is_owned for entry in entries) else "stopped"
    else:
        state = "failed"
    return replace(row, attempt=newest, state=state)
