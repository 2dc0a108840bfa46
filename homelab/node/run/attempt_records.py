"""Reads the records of one attempt. A record that is incomplete or has the wrong types counts as absent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_AGENT = {"pid": int, "torchrun_pid": int, "started_at": (int, float)}
_RANK = {"rank": int, "node": str, "local_rank": int}
_NODE = {"name": str, "lan_address": str}


def agent(node_dir: str) -> JsonObject | None:
    """agent.json: pid, torchrun_pid, started_at; None when nothing was started here."""
    record = files.read_object(os.path.join(node_dir, "agent.json"))
    return record if _has(record, _AGENT) else None


def plan(run_folder: str, attempt: int) -> JsonObject:
    """{"nodes": [...], "ranks": [...], "step_s": ...} of plan.json: the entries that are whole; how long a step is expected to take, or None."""
    record = files.read_object(os.path.join(paths.attempt_dir(run_folder, attempt), "plan.json")) or {}
    expected = record.get("time")
    step_s = expected["step_s"] if isinstance(expected, dict) and _has(expected, {"step_s": (int, float)}) else None
    return {"nodes": _those(record.get("nodes"), _NODE), "ranks": _those(record.get("ranks"), _RANK), "step_s": step_s}


def rank_pids(run_folder: str) -> Any:
    """The processes of the newest attempt's ranks here, from their heartbeats; they may have ended."""
    pids = []
    home = os.path.join(paths.attempt_dir(run_folder, paths.newest_attempt(run_folder)), "ranks")
    for rank in os.listdir(home) if os.path.isdir(home) else ():
        beat = files.read_object(os.path.join(home, rank, "heartbeat.json")) or {}
        if type(beat.get("pid")) is int:
            pids.append(beat["pid"])
    return pids


def _those(entries: Any, kinds: JsonObject) -> list[JsonObject]:
    return [entry for entry in entries if _has(entry, kinds)] if isinstance(entries, list) else []


def _has(value: Any, kinds: JsonObject) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())
