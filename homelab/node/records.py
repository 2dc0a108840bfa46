"""What was written down of one attempt, read back: what is not whole, or not of the right types, counts as absent."""

import os

from homelab.node import files, paths

_AGENT = {"pid": int, "torchrun_pid": int, "started_at": (int, float)}
_RANK = {"rank": int, "node": str, "local_rank": int}
_NODE = {"name": str, "lan_address": str}


def agent(node_dir):
    """agent.json: pid, torchrun_pid, started_at; None when nothing was started here."""
    found = files.read_object(os.path.join(node_dir, "agent.json"))
    return found if _has(found, _AGENT) else None


def plan(run_folder, attempt):
    """{"nodes": [...], "ranks": [...], "step_s": ...} of plan.json: the entries that are whole; how long a step is expected to take, or None."""
    found = files.read_object(os.path.join(paths.attempt_dir(run_folder, attempt), "plan.json")) or {}
    expected = found.get("time")
    step_s = expected.get("step_s") if _has(expected, {"step_s": (int, float)}) else None
    return {"nodes": _those(found.get("nodes"), _NODE), "ranks": _those(found.get("ranks"), _RANK), "step_s": step_s}


def rank_pids(run_folder):
    """The processes of the newest attempt's ranks here, by what they said themselves; they may be gone."""
    found = []
    for number in paths.attempts(run_folder)[-1:]:
        home = os.path.join(paths.attempt_dir(run_folder, number), "ranks")
        for rank in os.listdir(home) if os.path.isdir(home) else ():
            beat = files.read_object(os.path.join(home, rank, "heartbeat.json")) or {}
            if type(beat.get("pid")) is int:
                found.append(beat["pid"])
    return found


def _those(entries, kinds):
    return [entry for entry in entries if _has(entry, kinds)] if isinstance(entries, list) else []


def _has(value, kinds):
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())
