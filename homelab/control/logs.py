"""What the ranks printed, gathered from their nodes."""

from __future__ import annotations

import sys
import time
from typing import Any

from homelab.control import find, parts
from homelab.errors import HomelabError, InputError
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import reply as replies
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.state import FINISHED, newest_attempt, run_state

_FOLLOW_INTERVAL_S = 1.0


def tails(fleet: Fleet, paths: RunPaths, rank: int | None, lines: int, attempt: int | None = None) -> dict[str, Any]:
    """{"run", "attempt", "newest_attempt", "ranks": {rank: {"node", "stdout", "stderr"}}, "torchrun": {node: lines}, "unreachable": {node: why}}.

    `attempt`: default the newest. Raises InputError for a rank or an attempt that is not there.
    """
    found, _ = _look(fleet, paths, rank, lines, attempt)
    return found


def print_tails(
    fleet: Fleet,
    paths: RunPaths,
    rank: int | None,
    lines: int,
    *,
    follow: bool,
    attempt: int | None = None,
    options: str = "",
) -> None:
    """Print the tails; with `follow`, what comes after them too, until the run ends. `options` are those of commands that are named."""
    found, finished = _look(fleet, paths, rank, lines, attempt)
    printed: dict[tuple[str, str], list[str]] = {}
    sys.stdout.write(f"{_title(found, options)}\n")
    _print_new(found, printed, headings=True)
    if not any(printed.values()) and finished and not found["unreachable"]:
        sys.stdout.write("nothing was printed in it\n")
    while follow and not finished:
        time.sleep(_FOLLOW_INTERVAL_S)
        shown = found["attempt"]
        found, finished = _look(fleet, paths, rank, max(lines, 400), attempt)
        if found["attempt"] != shown:
            sys.stdout.write(f"{_title(found, options)}\n")
            printed.clear()
        _print_new(found, printed, headings=False)


def _title(found: dict[str, Any], options: str) -> str:
    number, newest = found["attempt"], found["newest_attempt"]
    title = f"attempt {number} of {found['run']}"
    if number < newest:
        return f"{title}; the newest is attempt {newest}: homelab logs {found['run']}{options}"
    return (
        title
        if number <= 1
        else f"{title}, the newest; the one before: homelab logs {found['run']} --attempt {number - 1}{options}"
    )


def _look(
    fleet: Fleet, paths: RunPaths, rank: int | None, lines: int, attempt: int | None
) -> tuple[dict[str, Any], bool]:
    """What is printed, and whether nothing more will come."""
    plan: Plan | None = find.plan_of(paths)
    assert plan is not None
    if (
        attempt is not None and attempt > plan.attempt
    ):  # another controller, or a supervisor on a node, may have recovered the run
        _look(fleet, paths, None, 1, None)
        plan = find.plan_of(paths)
    newest = plan.attempt
    if attempt is not None and not 1 <= attempt <= newest:
        raise InputError(
            f"there is no attempt {attempt}",
            where=f"{paths.name}: attempts 1 to {newest}",
            hint=f"homelab logs {paths.name}",
        )
    number = attempt or newest
    if number < newest:
        try:
            plan = find.plan_of(paths, number)
        except HomelabError:  # its plan is damaged; the nodes have theirs
            plan = None
    if plan is not None and rank is not None and rank not in [entry.rank for entry in plan.ranks]:
        raise InputError(
            f"there is no rank {rank}",
            where=f"{paths.name}, attempt {number}: ranks 0 to {plan.world_size - 1}",
            hint=f"homelab logs {paths.name} --rank 0{'' if attempt is None else f' --attempt {attempt}'}",
        )
    known = {node.name for node in fleet.cluster.nodes}
    wanted = [entry for entry in plan.ranks if rank is None or entry.rank == rank] if plan else []
    names = sorted({entry.node for entry in wanted}) if plan else sorted(known)
    request = {
        "run": paths.name, "tail_lines": lines, "torchrun_lines": lines, "after_lines": {str(entry.rank): 1 << 60 for entry in wanted},
        **({} if attempt is None else {"attempt": attempt}),
    }  # fmt: skip
    answers, errors, _ = parts.poll(fleet, request, names)
    parsed = replies.parse_replies(answers)
    if attempt is None and newest_attempt(parsed) > number:
        knows = max(parsed, key=lambda name: parsed[name].run.attempt if parsed[name].run else 0)  # type: ignore[union-attr]
        if find.refresh(fleet, paths, parsed[knows].node).attempt > number:
            return _look(fleet, paths, rank, lines, None)
    # A node that has not heard of this attempt yet speaks of the one before.
    heard = {
        name: said if said.run and said.run.attempt == number else said.model_copy(update={"run": None})
        for name, said in parsed.items()
    }
    found: dict[str, Any] = {
        "run": paths.name,
        "attempt": number,
        "newest_attempt": newest,
        "ranks": {},
        "torchrun": {},
        "unreachable": errors,
    }
    for name, answer in heard.items():
        if answer.run is None:
            continue
        found["torchrun"][name] = list(answer.run.torchrun_tail)
        for its_rank, entry in answer.run.ranks.items():
            if rank is None or its_rank == rank:
                found["ranks"][its_rank] = {
                    "node": name,
                    "stdout": list(entry.log_tail.stdout),
                    "stderr": list(entry.log_tail.stderr),
                }
    kept: Any = store.state_of(paths, number)
    state = run_state(names, heard, errors, kept=kept)
    return found, number < newest or state in FINISHED


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
