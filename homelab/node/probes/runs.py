"""Runs of homelab that are alive on this node and how far they are, those that are being recovered, and ended runs whose secrets were still on its disk."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, claims, ownership, secret_files
from homelab.node.system import processes
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.run_messages import RunAtWork, RunRecovered

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_LAST_LINES = 40


def read(request: JsonObject) -> JsonObject:
    """Their names, and what each does."""
    pids_of = processes.of_runs(request["workdir"], request["node"])
    at_work = {run: _at_work(request["workdir"], run, request["node"], pids) for run, pids in pids_of.items()}
    recovered = _recovered(request["workdir"], request["node"], set(pids_of))
    return {
        "alive": sorted(pids_of),
        "at_work": at_work,
        "recovered": recovered,
        "secrets_removed": secret_files.remove_leftovers(request["workdir"]),
    }


def _recovered(workdir: str, node: str, alive: set[str]) -> dict[str, RunRecovered]:
    """The runs of which nothing is alive here, though their supervisor is at work: it is between two attempts. A run that is done is none of them."""
    found: dict[str, RunRecovered] = {}
    root = os.path.join(paths.expand(workdir), layout.RUNS)
    for run in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        supervisor = ownership.follower(workdir, run) if layout.is_usable(run) and run not in alive else None
        if supervisor is None or supervisor.has_left or supervisor.is_dead:
            continue
        folder = paths.run_dir(workdir, run)
        attempt = paths.newest_attempt(folder)
        node_dir = paths.node_dir(folder, attempt, paths.name_here(folder, attempt, node))
        end = files.read_object(os.path.join(node_dir, layout.EXIT_JSON)) or {}
        if end.get("returncode") != 0 and claims.stopped_attempt(workdir, run) != attempt:
            found[run] = RunRecovered(by=supervisor.by, process=supervisor.process)
    return found


def _at_work(workdir: str, run: str, node: str, pids: list[int]) -> RunAtWork:
    """How far the newest attempt is, by the rank here that has spoken last."""
    folder = paths.run_dir(workdir, run)
    attempt = paths.newest_attempt(folder)
    node_dir = paths.node_dir(folder, attempt, paths.name_here(folder, attempt, node))
    agent = attempt_records.agent(node_dir) or {}
    beat, home = _newest_beat(os.path.join(paths.attempt_dir(folder, attempt), "ranks"), set(pids))
    return RunAtWork(
        has_ended=os.path.exists(os.path.join(node_dir, layout.EXIT_JSON)) or not {agent.get("pid"), agent.get("torchrun_pid")} & set(pids),
        phase=beat["phase"] if isinstance(beat.get("phase"), str) else "",
        step=_count(beat.get("step")),
        total_steps=_count(beat.get("total_steps")),
        step_s=_step_s(os.path.join(home, layout.METRICS_JSONL)) if home else None,
        still_s=abs(time.time() - beat["time"]) if isinstance(beat.get("time"), (int, float)) else None,
        owner=ownership.busy(workdir, run),
    )


def _newest_beat(ranks: str, pids: set[int]) -> tuple[JsonObject, str]:
    """The last sign of life of a rank on this node, and its folder; nothing where there is none, as of a program of one's own."""
    found: list[tuple[float, JsonObject, str]] = []
    for rank in os.listdir(ranks) if os.path.isdir(ranks) else ():
        beat = files.read_object(os.path.join(ranks, rank, layout.HEARTBEAT_JSON)) or {}
        if beat.get("pid") in pids and isinstance(beat.get("time"), (int, float)):
            found.append((beat["time"], beat, os.path.join(ranks, rank)))
    return max(found, key=lambda entry: entry[0])[1:] if found else ({}, "")


def _step_s(metrics: str) -> float | None:
    """The usual time of the last steps; None before the second one."""
    lines = files.json_objects(files.tail(metrics, _LAST_LINES))
    seconds = [
        line["step_s"]
        for line in lines
        if line.get("kind") == "train" and isinstance(line.get("step_s"), (int, float)) and line["step_s"] > 0
    ]
    return statistics.median(seconds) if seconds else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
