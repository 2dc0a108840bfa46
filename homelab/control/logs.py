"""What the ranks printed, gathered from their nodes."""

from __future__ import annotations

import sys
import time
from typing import Any

from homelab.control import find
from homelab.errors import InputError
from homelab.remote.fanout import Fleet
from homelab.runs import reply as replies
from homelab.runs.paths import RunPaths
from homelab.runs.state import FINISHED, run_state

_FOLLOW_INTERVAL_S = 1.0


def tails(fleet: Fleet, paths: RunPaths, rank: int | None, lines: int) -> dict[str, Any]:
    """{"ranks": {rank: {"node", "stdout", "stderr"}}, "torchrun": {node: lines}, "unreachable": {node: why}}. Raises InputError."""
    found, _ = _look(fleet, paths, rank, lines)
    return found


def print_tails(fleet: Fleet, paths: RunPaths, rank: int | None, lines: int, *, follow: bool) -> None:
    """Print the tails; with `follow`, what comes after them too, until the run ends."""
    found, finished = _look(fleet, paths, rank, lines)
    printed: dict[tuple[str, str], list[str]] = {}
    _print_new(found, printed, headings=True)
    while follow and not finished:
        time.sleep(_FOLLOW_INTERVAL_S)
        found, finished = _look(fleet, paths, rank, max(lines, 400))
        _print_new(found, printed, headings=False)


def _look(fleet: Fleet, paths: RunPaths, rank: int | None, lines: int) -> tuple[dict[str, Any], bool]:
    plan = find.plan_of(paths)
    if rank is not None and rank not in [entry.rank for entry in plan.ranks]:
        raise InputError(
            f"there is no rank {rank}",
            where=f"{paths.name}, attempt {plan.attempt}: ranks 0 to {plan.world_size - 1}",
            hint=f"homelab logs {paths.name} --rank 0",
        )
    wanted = [entry for entry in plan.ranks if rank is None or entry.rank == rank]
    names = sorted({entry.node for entry in wanted} & {node.name for node in fleet.cluster.nodes})
    request = {
        "run": paths.name,
        "attempt": plan.attempt,
        "tail_lines": lines,
        "torchrun_lines": lines,
        "after_lines": {str(entry.rank): 1 << 60 for entry in wanted},
    }
    answers, errors = fleet.ask("poll", request, names=names)
    parsed = replies.parse_replies(answers)
    found: dict[str, Any] = {
        "run": paths.name,
        "attempt": plan.attempt,
        "ranks": {},
        "torchrun": {},
        "unreachable": {name: error.message for name, error in errors.items()},
    }
    for name, answer in parsed.items():
        if answer.run is None:
            continue
        found["torchrun"][name] = list(answer.run.torchrun_tail)
        for number, entry in answer.run.ranks.items():
            if rank is None or number == rank:
                found["ranks"][number] = {
                    "node": name,
                    "stdout": list(entry.log_tail.stdout),
                    "stderr": list(entry.log_tail.stderr),
                }
    state = run_state(names, parsed, {name: error.message for name, error in errors.items()})
    return found, state in FINISHED


def _print_new(found: dict[str, Any], printed: dict[tuple[str, str], list[str]], *, headings: bool) -> None:
    for number in sorted(found["ranks"]):
        entry = found["ranks"][number]
        for stream in ("stdout", "stderr"):
            _print_stream(f"rank {number} on {entry['node']}", stream, entry[stream], printed, headings=headings)
    for node, lines in found["torchrun"].items():
        _print_stream(f"torchrun on {node}", "stderr", lines, printed, headings=headings)
    for node, why in found["unreachable"].items() if headings else ():
        sys.stderr.write(f"{node} could not be asked: {why}\n")
    sys.stdout.flush()


def _print_stream(
    label: str, stream: str, lines: list[str], printed: dict[tuple[str, str], list[str]], *, headings: bool
) -> None:
    new = _after(printed.get((label, stream), []), lines)
    printed[label, stream] = lines
    if not new:
        return
    if headings:
        sys.stdout.write(f"--- {label}, {stream}\n" + "".join(f"{line}\n" for line in new))
    else:
        sys.stdout.write("".join(f"[{label}] {line}\n" for line in new))


def _after(old: list[str], new: list[str]) -> list[str]:
    """The lines of `new` that come after the end of `old` (both are tails of one growing text)."""
    for overlap in range(min(len(old), len(new)), 0, -1):
        if old[-overlap:] == new[:overlap]:
            return new[overlap:]
    # The old tail may lie whole inside the new, longer one.
    for start in range(len(new) - len(old) + 1) if old else ():
        if new[start : start + len(old)] == old:
            return new[start + len(old) :]
    return new
