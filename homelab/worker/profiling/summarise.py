"""`python -m homelab.worker.profiling.summarise PARTIAL FOLDER`: the raw trace of a rank becomes its profile, beside the training.

A process of its own: the trace of a large model is hundreds of megabytes, and the training shall feel neither its memory nor its seconds.
FOLDER gets its name when both files in it are whole. What fails is one line on stderr, and exit code 1.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from homelab.shared.protocol import files, profile_files
from homelab.worker.profiling import memory_line, operators, overlap, raw_profile, trace_tree
from homelab.worker.profiling.trace_tree import Call

_ANNOTATION = "user_annotation"
_NICE = 10
_LEAST_GAP_US = 1.0
_PROBE_BYTES = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Make the profile. Returns 0, or 1 where that fails."""
    partial, folder = Path(arguments[0]), Path(arguments[1])
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    try:
        summary = _made(partial)
        files.write_json(partial / profile_files.SUMMARY, summary)
        for name in (raw_profile.TRACE, raw_profile.MEASURED):
            (partial / name).unlink()
        os.replace(partial, folder)
        files.sync(folder.parent)
    except OSError as error:
        print(f"{error.strerror}: {error.filename or partial}", file=sys.stderr)
        return 1
    except (ValueError, KeyError, TypeError, MemoryError) as error:
        print(f"the trace cannot be read: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _made(partial: Path) -> dict[str, Any]:
    """Write the trace, packed; its summary. Raises OSError, ValueError."""
    raw = raw_profile.RawProfile(**json.loads((partial / raw_profile.MEASURED).read_text(encoding="utf-8")))
    try:
        trace = json.loads((partial / raw_profile.TRACE).read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        with (partial / raw_profile.TRACE).open("ab") as stream:  # torch's writer says nothing of a disk that is full
            stream.write(bytes(_PROBE_BYTES))
        raise
    summary = summed_up(trace, raw)
    with (partial / profile_files.TRACE).open("wb") as out, gzip.open(out, "wt", compresslevel=5, encoding="utf-8") as packed:
        json.dump(trace, packed, separators=(",", ":"))
        packed.flush()
    files.sync(partial / profile_files.TRACE)
    return summary


def summed_up(trace: dict[str, Any], raw: raw_profile.RawProfile) -> dict[str, Any]:
    """profile.json of a trace, to which the exchanges and the waits in the backward pass are added. Pure but for that."""
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = trace["traceEvents"]
    events.extend(_waits(trace_tree.calls(events), raw, base_ns))
    calls = trace_tree.calls(events)
    from_us = (raw.steps[0]["begin_ns"] - base_ns) / 1e3
    step_s = [float(step["step_s"]) for step in raw.steps]
    exchanges = overlap.placed(raw.exchanges, raw.steps, events, base_ns)
    on_card = raw.device == "cuda"
    summary = {
        "schema": 1, "run": raw.run, "attempt": raw.attempt, "rank": raw.rank, "node": raw.node, "device": raw.device, "strategy": raw.strategy,
        "world_size": raw.world_size, "torch": raw.torch, "steps": [step["step"] for step in raw.steps], "step_s": step_s,
        "times": [[step["begin_ns"] / 1e9, step["end_ns"] / 1e9] for step in raw.steps], "usual_step_s": raw.usual_step_s,
        "phases": _phases(calls),
        "operators": operators.dearest(calls, events, raw.modules, 1e6 * sum(step_s)),
        "exchanges": overlap.table(exchanges),
        "memory": memory_line.line(events, calls, raw.held_bytes, on_card=on_card, from_us=from_us),
    }  # fmt: skip
    _name_steps(events, raw)
    events.extend(_exchange_events(exchanges, events))
    return summary


def _waits(calls: Sequence[Call], raw: raw_profile.RawProfile, base_ns: int) -> Iterator[dict[str, Any]]:
    """Ranges for the time in which the backward pass waits for the others: nothing runs in it after this rank's last gradient."""
    ready_us = [(step["ready_ns"] - base_ns) / 1e3 for step in raw.steps if step.get("ready_ns")]
    for call in calls:
        moment = next((ready for ready in ready_us if call.begin_us <= ready <= call.end_us), None)
        if call.name != profile_files.BACKWARD or moment is None:
            continue
        begin = moment
        ends = [(child.begin_us, child.end_us) for child in call.children if child.end_us > moment]
        for child_begin, child_end in [*ends, (call.end_us, call.end_us)]:
            if child_begin - begin > _LEAST_GAP_US:
                pid, tid = call.thread
                yield {
                    "ph": "X",
                    "cat": _ANNOTATION,
                    "name": profile_files.REDUCTION,
                    "pid": pid,
                    "tid": tid,
                    "ts": begin,
                    "dur": child_begin - begin,
                    "args": {},
                }
            begin = max(begin, child_end)


def _phases(calls: Sequence[Call]) -> dict[str, float]:
    """Phase -> seconds of all profiled steps together, on the thread of the steps; what is in no phase is "other"."""
    main = next((call.thread for call in calls if call.name in profile_files.PHASES), None)
    seconds = dict.fromkeys((*profile_files.PHASES, "other"), 0.0)
    for call in calls:
        if call.thread == main:
            seconds[call.phase or "other"] += call.self_us / 1e6
    return seconds


def _name_steps(events: list[dict[str, Any]], raw: raw_profile.RawProfile) -> None:
    """The profiler counts its own steps; a person knows those of the run."""
    names = sorted(
        {event["name"] for event in events if str(event.get("name", "")).startswith(trace_tree.STEP)},
        key=lambda name: int(name[len(trace_tree.STEP) :]),
    )
    known = {name: f"{trace_tree.STEP}{step['step']}" for name, step in zip(names, raw.steps, strict=False)}
    for event in events:
        event["name"] = known.get(event.get("name", ""), event.get("name", ""))


def _exchange_events(exchanges: Sequence[overlap.TracedExchange], events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The exchanges as tracks of their own: they overlap each other and what the rank computes."""
    pid = next((event["pid"] for event in events if event.get("cat") == _ANNOTATION), 0)
    for number, one in enumerate(exchanges):
        about = {"payload bytes": one.payload_bytes, "sent bytes": round(one.sent_bytes), "overlap us": round(one.overlap_us, 1)}
        common = {"cat": "exchange", "name": f"{one.kind}: {one.name}", "id": number, "pid": pid, "tid": pid}
        yield {**common, "ph": "b", "ts": one.begin_us, "args": about}
        yield {**common, "ph": "e", "ts": one.end_us}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
