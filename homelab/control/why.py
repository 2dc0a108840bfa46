"""Why a run failed: by what its nodes say of the attempt, and by what was kept of it when they do not answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.control import diagnosed, find, parts, watch
from homelab.control.diagnosed import Kept
from homelab.dashboard.snapshot import EventRow, NextCommand, event_row
from homelab.errors import HomelabError, InputError
from homelab.remote.fanout import Fleet
from homelab.runs import reply as replies
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import NodeLoad, Reply
from homelab.runs.state import State, run_state

_POLL_TIMEOUT_S = 15.0
_ALL_LINES = 1 << 60  # of the metrics: they say nothing of a failure
_NOT_STARTED = re.compile(r"the start failed|attempt \d+ did not start|interrupted before it ran")
_OF_ATTEMPT = re.compile(r"attempt (\d+) (?:goes on|started|did not start)")


@dataclass(frozen=True)
class Why:
    """The answer. `attempt` is the one it is about, in `state`; `run_state` is that of the run, which may have gone on in a newer one.

    `told` is None when that attempt did not fail, or when nothing says why. `is_kept`: it is what was written down at that time,
    because the nodes know less now. `not_started` says why nothing was started in that attempt. `since` is what happened to the run
    after the failure, `alone` what its owner has to do because no supervisor does it.
    """

    run: str
    attempt: int
    state: State
    newest_attempt: int
    run_state: State
    step: int
    told: Kept | None
    is_kept: bool
    unreachable: dict[str, str]
    not_started: str
    since: tuple[EventRow, ...]
    alone: tuple[str, ...]
    next_command: NextCommand

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {
            "run": self.run, "attempt": self.attempt, "state": self.state, "newest_attempt": self.newest_attempt, "run_state": self.run_state,
            "step": self.step, "diagnosis": self.told.diagnosis.model_dump(mode="json") if self.told else None,
            "made_at": self.told.made_at if self.told else None, "source": None if self.told is None else "kept" if self.is_kept else "nodes",
            "not_started": self.not_started, "unreachable": self.unreachable, "since": [row.model_dump(mode="json") for row in self.since],
            "without_supervisor": list(self.alone), "next": self.next_command.command,
        }  # fmt: skip


@dataclass(frozen=True)
class _Judged:
    """One attempt."""

    state: State
    told: Kept | None
    is_kept: bool
    unreachable: dict[str, str]


def look(fleet: Fleet, paths: RunPaths, attempt: int | None, say: Callable[[str], None], options: str) -> Why:
    """Ask the nodes about this attempt, or about the newest that failed. Raises InputError when there is no such attempt.

    Without `attempt` and without a failure the answer is about the newest attempt.
    """
    say(f"asking what happened to {paths.name}")
    watcher = watch.Watcher(fleet, paths, options)
    seen = watcher.look()
    if attempt is not None and not 1 <= attempt <= seen.attempt:
        raise InputError(
            f"there is no attempt {attempt}",
            where=f"{paths.name}: attempts 1 to {seen.attempt}",
            hint=f"homelab why {paths.name}{options}",
        )
    newest = _of_newest(paths, seen.attempt, seen.state, watcher)
    found, number = newest, seen.attempt
    for number in [attempt] if attempt else range(seen.attempt, 0, -1):
        found = newest if number == seen.attempt else _of_older(fleet, paths, number, options)
        if found.told is not None or found.state == "failed":
            break
    else:
        if attempt is None:
            found, number = newest, seen.attempt
    has_failed = found.told is not None or found.state == "failed"
    events = store.events(paths)
    last = [event_row(line).text for line in events if _NOT_STARTED.match(str(line.get("what", "")))]
    not_started = last[-1] if last and number == seen.attempt and found.state in ("planned", "shipping") else ""
    # What has to be done because nobody does it by itself comes before looking on.
    alone = [entry for entry in seen.next_commands if any(said.endswith(entry.command) for said in watcher.without_supervisor)]
    next_command = next(iter((*alone, *seen.next_commands)))
    if found.told and found.told.diagnosis.launch and number == seen.attempt and seen.state in ("failed", "stopped"):
        next_command = NextCommand(purpose="launch", command=found.told.diagnosis.launch)  # as the fix says
    return Why(
        paths.name, number, found.state, seen.attempt, seen.state, seen.step, found.told, found.is_kept, found.unreachable,
        not_started, since(events, number) if has_failed else (), watcher.without_supervisor, next_command,
    )  # fmt: skip


def _of_newest(paths: RunPaths, number: int, state: State, watcher: watch.Watcher) -> _Judged:
    kept = diagnosed.read(paths, number)
    fresh = None
    if state in ("failed", "lost"):
        diagnosis = watcher.diagnosis()
        if diagnosis is not None:
            fresh = Kept(attempt=number, made_at=time.time(), unreachable=watcher.unreachable, diagnosis=diagnosis)
    elif state != "stopped":  # it goes on, or ended well: whatever was kept of it was not its end
        kept = None
    return _Judged(state, *_better(fresh, kept), watcher.unreachable)


def _of_older(fleet: Fleet, paths: RunPaths, number: int, options: str) -> _Judged:
    """What the nodes say now of an attempt that is over, and what was kept of it."""
    known = {node.name for node in fleet.cluster.nodes}
    try:
        plan = find.plan_of(paths, number)
        names, ranks = {node.name for node in plan.nodes}, [rank.rank for rank in plan.ranks]
    except HomelabError:  # its plan is damaged; the nodes have theirs
        names, ranks = known, []
    lines = {str(rank): _ALL_LINES for rank in ranks}
    request = {"run": paths.name, "attempt": number, "tail_lines": 200, "after_lines": lines}
    answers, unreachable, _ = parts.poll(fleet, request, sorted(names), timeout_s=_POLL_TIMEOUT_S)
    heard = {name: _as_it_was(reply) for name, reply in replies.parse_replies(answers).items()}
    # Which nodes cannot be reached today says nothing of that day.
    state = run_state(sorted(names), heard, unreachable)
    fresh = None
    if state == "failed":
        diagnosis = diagnosed.make(fleet.cluster, paths, heard, {}, options=options)
        if diagnosis is not None:
            fresh = Kept(attempt=number, made_at=time.time(), unreachable=unreachable, diagnosis=diagnosis)
    return _Judged(state, *_better(fresh, diagnosed.read(paths, number)), unreachable)


def _as_it_was(reply: Reply) -> Reply:
    """The answer with the clock at the attempt's end, and without what is only true of the machine today."""
    ended_at = reply.run.exit.ended_at if reply.run and reply.run.exit else None
    return reply.model_copy(update={"time": ended_at or reply.time, "load": NodeLoad(), "gpus": ()})


def _better(fresh: Kept | None, kept: Kept | None) -> tuple[Kept | None, bool]:
    """The one with less doubt, that of today where both have the same; and whether it is the one that was kept."""
    is_kept = kept is not None and (fresh is None or kept.outlasts(fresh))
    return (kept if is_kept else fresh), is_kept


def since(lines: Sequence[dict[str, Any]], attempt: int) -> tuple[EventRow, ...]:
    """What the controller wrote down after this attempt had failed: other attempts, nodes left out, a stop."""
    is_in_attempt = attempt == 1
    for index, line in enumerate(lines):
        what = str(line.get("what", ""))
        begun = _OF_ATTEMPT.match(what)
        if begun:
            if int(begun[1]) > attempt:
                return tuple(event_row(entry) for entry in lines[index:])
            is_in_attempt = int(begun[1]) == attempt
        elif is_in_attempt and re.match(r"(failed|lost)\b", what):
            return tuple(event_row(entry) for entry in lines[index + 1 :])
    return ()
