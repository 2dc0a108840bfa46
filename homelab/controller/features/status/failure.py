"""Why a run failed: by what its nodes say of the attempt, and by what was kept of it when they do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from homelab.controller.attempt import diagnosis_store
from homelab.controller.attempt.diagnosis_store import StoredDiagnosis
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, Options, homelab
from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.dashboard.snapshot import EventRow, GivenBack, NextCommand
from homelab.controller.features.status import monitor
from homelab.controller.remote import poll_reply as replies
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, events, node_matching, run_folder
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import State, run_state
from homelab.shared.protocol.run_messages import NodeLoad, Reply

_POLL_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Why:
    """The answer. `attempt` is the one it is about, in `state`; `run_state` is that of the run, which may have gone on in a newer one.

    `stored` is None when that attempt did not fail, or when nothing says why. `is_kept`: it is what was written down at that time,
    because the nodes know less now. `not_started` says why nothing was started in that attempt. `since` is what happened to the run
    after the failure, `alone` what its owner has to do because no supervisor does it, `given_back` who is with an owner now.
    """

    run: str
    attempt: int
    state: State
    newest_attempt: int
    run_state: State
    step: int
    stored: StoredDiagnosis | None
    is_kept: bool
    unreachable: dict[str, str]
    not_started: str
    since: tuple[EventRow, ...]
    alone: tuple[Hint, ...]
    next_command: NextCommand
    given_back: tuple[GivenBack, ...] = ()

    def with_options(self, options: Options) -> Why:
        """The same, in which the commands of ours have the options that its reader needs."""
        stored = self.stored and self.stored.model_copy(update={"diagnosis": self.stored.diagnosis.with_options(options)})
        alone = tuple(line.with_options(options) for line in self.alone)
        return replace(self, stored=stored, alone=alone, next_command=self.next_command.with_options(options))

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {
            "run": self.run, "attempt": self.attempt, "state": self.state, "newest_attempt": self.newest_attempt, "run_state": self.run_state,
            "step": self.step, "diagnosis": self.stored.diagnosis.model_dump(mode="json") if self.stored else None,
            "made_at": self.stored.made_at if self.stored else None, "source": None if self.stored is None else "kept" if self.is_kept else "nodes",
            "not_started": self.not_started, "unreachable": self.unreachable, "since": [row.model_dump(mode="json") for row in self.since],
            "without_supervisor": list(self.alone), "next": self.next_command.command,
            "given_back": [row.model_dump(mode="json") for row in self.given_back],
        }  # fmt: skip


@dataclass(frozen=True)
class _Judged:
    """One attempt."""

    state: State
    stored: StoredDiagnosis | None
    is_kept: bool
    unreachable: dict[str, str]


def look(fleet: Fleet, paths: RunPaths, attempt: int | None, say: Callable[[str], None]) -> Why:
    """Ask the nodes about this attempt, or about the newest that failed. Raises InputError when there is no such attempt.

    Without `attempt` and without a failure the answer is about the newest attempt.
    """
    say(f"reading what happened to {paths.name}")
    watcher = monitor.Watcher(fleet, paths)
    snapshot = watcher.look()
    if attempt is not None and not 1 <= attempt <= snapshot.attempt:
        raise InputError(
            f"there is no attempt {attempt}", where=f"{paths.name}: attempts 1 to {snapshot.attempt}", hint=homelab("why", paths.name)
        )
    newest = _of_newest(paths, snapshot.attempt, snapshot.state, watcher)
    judged, number = newest, snapshot.attempt
    lines = event_log.lines(paths)
    # An attempt that ended for an owner, or for a node that came back, is no failure: a run of months has thousands of them.
    moved = {line.get("attempt") for line in lines if line.get("event") == "restart"}
    for number in [attempt] if attempt else [number for number in range(snapshot.attempt, 0, -1) if number not in moved]:
        judged = newest if number == snapshot.attempt else _of_older(fleet, paths, number)
        if judged.stored is not None or judged.state == "failed":
            break
    else:
        if attempt is None:
            judged, number = newest, snapshot.attempt
    has_failed = judged.stored is not None or judged.state == "failed"
    last = [events.text_of(line) for line in lines if events.read(line).tells_why_not_started]
    not_started = last[-1] if last and number == snapshot.attempt and judged.state in ("planned", "shipping") else ""
    # A command that only a person can start comes before one that follows the run.
    alone = [entry for entry in snapshot.next_commands if any(entry.command in warning.commands for warning in watcher.without_supervisor)]
    next_command = next(iter((*alone, *snapshot.next_commands)))
    if judged.stored and judged.stored.diagnosis.launch and number == snapshot.attempt and snapshot.state in ("failed", "stopped"):
        next_command = NextCommand(purpose="launch", command=judged.stored.diagnosis.launch)  # as the fix says
    return Why(
        paths.name, number, judged.state, snapshot.attempt, snapshot.state, snapshot.step, judged.stored, judged.is_kept, judged.unreachable,
        not_started, since(lines, number) if has_failed else (), watcher.without_supervisor, next_command,
        snapshot.given_back,
    )  # fmt: skip


def _of_newest(paths: RunPaths, number: int, state: State, watcher: monitor.Watcher) -> _Judged:
    kept = diagnosis_store.read(paths, number)
    fresh = None
    if state in ("failed", "lost"):
        diagnosis = watcher.diagnosis()
        if diagnosis is not None:
            fresh = StoredDiagnosis(attempt=number, made_at=time.time(), unreachable=watcher.unreachable, diagnosis=diagnosis)
    elif state != "stopped":  # the run continues or ended well, so a kept diagnosis is not about its end
        kept = None
    return _Judged(state, *_better(fresh, kept), watcher.unreachable)


def _of_older(fleet: Fleet, paths: RunPaths, number: int) -> _Judged:
    """What the nodes say now of an attempt that is over, and what was kept of it."""
    in_cluster = {node.name for node in fleet.cluster.nodes}
    try:
        plan = run_folder.plan_of(paths, number)
        names, ranks = {node.name for node in plan.nodes}, [rank.rank for rank in plan.ranks]
    except HomelabError:  # its plan is damaged; the nodes have theirs
        names, ranks = in_cluster, []
    known_lines = dict.fromkeys(ranks, node_matching.ALL_LINES)
    request = node_matching.poll_request(paths.name, tail_lines=200, attempt=number, known_lines=known_lines)
    answers, unreachable, _ = node_matching.poll(fleet, request, sorted(names), timeout_s=_POLL_TIMEOUT_S)
    poll_replies = {name: _as_it_was(reply) for name, reply in replies.parse_replies(answers).items()}
    # Which nodes cannot be reached today says nothing of that day.
    state = run_state(sorted(names), poll_replies, unreachable)
    fresh = None
    if state == "failed":
        diagnosis = diagnosis_store.make(fleet.cluster, paths, poll_replies, {})
        if diagnosis is not None:
            fresh = StoredDiagnosis(attempt=number, made_at=time.time(), unreachable=unreachable, diagnosis=diagnosis)
    return _Judged(state, *_better(fresh, diagnosis_store.read(paths, number)), unreachable)


def _as_it_was(reply: Reply) -> Reply:
    """The answer with the clock at the attempt's end, and without what is only true of the machine today."""
    ended_at = reply.run.exit.ended_at if reply.run and reply.run.exit else None
    return reply.replace(time=ended_at or reply.time, load=NodeLoad(), gpus=())


def _better(fresh: StoredDiagnosis | None, kept: StoredDiagnosis | None) -> tuple[StoredDiagnosis | None, bool]:
    """The one with less doubt, that of today where both have the same; and whether it is the one that was kept."""
    is_kept = kept is not None and (fresh is None or kept.outlasts(fresh))
    return (kept if is_kept else fresh), is_kept


def since(lines: Sequence[dict[str, Any]], attempt: int) -> tuple[EventRow, ...]:
    """What the controller wrote down after this attempt had failed: other attempts, nodes left out, a stop."""
    is_in_attempt = attempt == 1
    for index, line in enumerate(lines):
        event = events.read(line)
        if event.begins_an_attempt and event.attempt is not None:
            if event.attempt > attempt:
                return tuple(event_row(entry) for entry in lines[index:])
            is_in_attempt = event.attempt == attempt
        elif is_in_attempt and event.is_a_failure:
            return tuple(event_row(entry) for entry in lines[index + 1 :])
    return ()
