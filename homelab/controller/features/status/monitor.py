"""Looking at a run: one question to every node, the answers kept in the run's folder, a Snapshot out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from homelab.controller.attempt import diagnosis_store, remote_supervisor, run_owner
from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE, ToldExit
from homelab.controller.base.hint import Hint, Options, homelab
from homelab.controller.dashboard import card_history
from homelab.controller.dashboard import live as live_dashboard
from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.snapshot_builder import NodeAnswers, RunInfo, build, next_commands
from homelab.controller.diagnose import cause
from homelab.controller.features.status import unsupervised
from homelab.controller.features.status.unsupervised import detect_stall
from homelab.controller.planning.types import Plan
from homelab.controller.remote import poll_reply as replies
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import (
    event_log,
    events,
    node_matching,
    ownership,
    run_folder,
    run_record,
    stopped_holder,
    store,
    supervisor_lock,
    supervisor_record,
)
from homelab.controller.run.metrics import Gathered
from homelab.controller.run.ownership import Ownership
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED, State, newest_attempt, node_part
from homelab.shared.protocol.run_messages import Reply, SupervisorReply
from homelab.shared.protocol.run_requests import PollRequest

INTERVAL_S = 2.0
_POLL_TIMEOUT_S = 15.0
_MOST_PARTS = 10  # of the metrics of a long run, at the first look


class Watcher:
    """Looks at one run again and again; asks only for what is new. `is_owner`: who looks holds the run, and asks how its attempt is."""

    def __init__(self, fleet: Fleet, paths: RunPaths, *, is_owner: bool = False) -> None:
        self._fleet = fleet
        self._paths = paths
        self._described = store.read_object(paths.run_json)
        recipe = self._described.get("recipe")
        self._is_script = isinstance(recipe, dict) and bool(recipe.get("script"))
        self._measured = Measured()
        self.gathered = Gathered(paths, self._measured)
        self._asked_before: set[int] = set()  # attempts whose head has said what came before them
        self._ends: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # attempt and rank -> lines known, and where the node's file has them, in bytes
        self.next_request: PollRequest | None = None
        """The question for what the newest answers did not bring: for another thread, which need not wait until a look has ended."""
        self.replies: dict[str, Reply] = {}
        self.unreachable: dict[str, str] = {}
        self.ways: dict[str, str] = {}
        """Node of `unreachable` -> what would make it answer, as its connection said."""
        self.without_supervisor: tuple[Hint, ...] = ()
        """What the owner has to know because nobody looks after the run; empty while somebody does, or need not."""
        self.owner = Ownership()
        """Who acted on the run at the last look."""
        self._is_owner = is_owner
        self._before: Snapshot | None = None
        self._still_since_s: float | None = None  # since when the run is seen to have ended, without an owner
        self._is_left = False

    def leave(self) -> None:
        """Nobody wants another look: one that waits for answers, in another thread, raises KeyboardInterrupt and writes nothing down.

        Its connections may be closed meanwhile, so that no node would seem to answer.
        """
        self._is_left = True

    def look(self, fleet: Fleet | None = None) -> Snapshot:
        """Ask every node of the plan once; gather metrics, write down the state when it changed. `fleet`: the connections from now on."""
        self._fleet = fleet or self._fleet
        plan, was_held = run_folder.plan_of(self._paths), supervisor_lock.is_held(self._paths)
        self._ask([node.name for node in plan.nodes])
        if newest_attempt(self.replies) > plan.attempt:
            # Another controller recovered this run: its plan is on the nodes.
            plan = run_folder.refresh(self._fleet, self._paths, self.replies)
            self._ask([node.name for node in plan.nodes])
        before = store.read_object(self._paths.state_json).get("state")
        kept = store.state_of(self._paths, plan.attempt)
        on_nodes = self._supervisors_on_nodes()
        for supervisor in on_nodes.values():  # the events are kept here, because a supervisor's node may be off later
            event_log.gather(self._paths, [event for line in supervisor.events if (event := replies.event_of(line))])
        for name, reply in self.replies.items():
            if reply.run and reply.run.secrets_removed:
                event_log.note_secrets_removed(self._paths, name)
        self.owner = run_owner.of_run(
            self._paths, max(plan.attempt, newest_attempt(self.replies)), self.replies, on_nodes, was_held=was_held, is_ours=self._is_owner
        )
        run = RunInfo(
            self._paths.name, self._described.get("recipe_file", ""), plan, self._is_script,
            intent=store.intent_of(self._paths, plan.attempt),  # type: ignore[arg-type]
            kept=kept,  # type: ignore[arg-type]
            owner=self.owner,
        )  # fmt: skip
        snapshot = build(run, NodeAnswers(time.time(), self.replies, self.unreachable, self._measured, event_log.lines(self._paths)))
        snapshot = self._before = card_history.with_history(snapshot, self._before)
        diagnosis = self._told(snapshot)
        scores = run_record.scores(self._described)
        following = next_commands(snapshot.state, snapshot.run, diagnosis, is_script=self._is_script, scores=scores)
        snapshot = snapshot.model_copy(update={"diagnosis": diagnosis, "next_commands": following})
        self.without_supervisor = self._without_supervisor(snapshot, plan)
        outliving = unsupervised.outliving(self.replies, snapshot.attempt, homelab("stop", snapshot.run))
        owners = [reply.owner for reply in self.replies.values() if reply.owner]
        stopped = stopped_holder.note(self._fleet.cluster, self._paths, on_nodes, owners) if snapshot.state != "done" else None
        notes = (
            *snapshot.notes,
            *map(Hint, self._off(snapshot, kept)),
            *self.without_supervisor,
            *outliving,
            *([stopped] if stopped else []),
        )
        snapshot = snapshot.model_copy(update={"notes": notes, "stopped_owner": stopped, "is_over": self._is_over(snapshot.state)})
        if snapshot.state != before:
            store.set_state(self._paths, snapshot.state, snapshot.attempt)
            self._tell(events.state(snapshot.state, snapshot.attempt, snapshot.diagnosis.title if snapshot.diagnosis else None))
        return snapshot

    def _is_over(self, state: State) -> bool:
        """Whether nothing more will happen by itself, which of a run without an owner is known after a while."""
        now_s = time.monotonic()
        if not ownership.is_over(state, self.owner, float("inf")):
            self._still_since_s = None
            return False
        self._still_since_s = now_s if self._still_since_s is None else self._still_since_s
        return ownership.is_over(state, self.owner, now_s - self._still_since_s)

    def _told(self, snapshot: Snapshot) -> cause.Diagnosis | None:
        """Why it failed: by what the nodes say, or by what was kept of it where that knows more. It is kept before anybody is told.

        Beside a stop by hand only a reason of the ranks' own is one: that a node is gone today, or let go later, ended nothing.
        """
        diagnosis = self.diagnosis() if self._has_failed(snapshot.attempt) else None
        if diagnosis is None:
            return None
        if snapshot.state in ("stopping", "stopped", "done"):
            return diagnosis if diagnosis.is_of_a_rank else None
        if snapshot.state == "failed":
            return diagnosis_store.keep(self._paths, snapshot.attempt, diagnosis, self.unreachable).diagnosis
        return (
            diagnosis_store.better(self._paths, snapshot.attempt, diagnosis, self.unreachable).diagnosis
            if snapshot.state == "lost"
            else diagnosis
        )

    def _off(self, snapshot: Snapshot, kept: str | None) -> tuple[str, ...]:
        """What to say of the nodes of a run that is known to have ended, where they cannot be asked any more."""
        if not self.unreachable or snapshot.state != kept or snapshot.state not in FINISHED:
            return ()
        are = "it is" if len(self.unreachable) == 1 else "they are"
        return (f"{snapshot.state}, as seen before; {', '.join(self.unreachable)} cannot be asked now ({are} off, or unreachable)",)

    def _supervisors_on_nodes(self) -> dict[str, SupervisorReply]:
        """Node -> what it says about a supervisor of this run there, at work or not."""
        reply_of = {name: reply.supervisor for name, reply in self.replies.items() if reply.supervisor}
        if remote_supervisor.recorded(self._paths) not in ("", *self.replies, *self.unreachable):  # on a node that takes no part any more
            reply_of |= remote_supervisor.look(self._fleet, self._paths)
        return reply_of

    def _without_supervisor(self, snapshot: Snapshot, plan: Plan) -> tuple[Hint, ...]:
        if snapshot.supervisor:
            return ()
        place = remote_supervisor.recorded(self._paths)
        silent = f"{place} does not answer" if place in self.unreachable else f"none is working on {place} any more"
        still = detect_stall(snapshot.attempt, [node.name for node in plan.nodes], self.replies, snapshot.step_s, plan.step_s)
        record = store.read_object(self._paths.supervisor_json)
        return unsupervised.unsupervised_warnings(
            snapshot.state, record, silent if place else "", still,
            recover=next((entry.command for entry in snapshot.next_commands if entry.purpose == "launch"), homelab("recover", snapshot.run)),
            supervise=homelab("supervise", snapshot.run), is_pending=supervisor_record.is_under_way(record),
        )  # fmt: skip

    def diagnosis(self) -> cause.Diagnosis | None:
        """What the newest answers say about a failure."""
        return diagnosis_store.make(self._fleet.cluster, self._paths, self.replies, self.unreachable, ways=self.ways)

    def _has_failed(self, attempt: int) -> bool:
        parts = [node_part(entry.run, attempt) for entry in self.replies.values() if entry.run and entry.run.attempt == attempt]
        return bool(self.unreachable) or bool({"failed", "vanished"} & set(parts))

    def _ask(self, names: list[str]) -> None:
        for _ in range(_MOST_PARTS):
            self._ask_once(names)
            if not any(reply.run and reply.run.more for reply in self.replies.values()):
                return

    def _ask_once(self, names: list[str]) -> None:
        plan = run_folder.plan_of(self._paths)
        attempt = plan.attempt
        has_all_before = attempt in self._asked_before or not self._lacks(plan.resume_step)
        request = self._request(attempt).replace(before=not has_all_before)
        answers, self.unreachable, self.ways = node_matching.poll(self._fleet, request, names, timeout_s=_POLL_TIMEOUT_S)
        if self._is_left:
            raise KeyboardInterrupt
        self.replies = replies.parse_replies(answers)
        if any(line for reply in self.replies.values() if reply.run for rank in reply.run.ranks.values() for line in rank.before):
            self._asked_before.add(attempt)
        keep(self._paths, answers, self.gathered)
        for run in [reply.run for reply in self.replies.values() if reply.run]:
            counts = self.gathered.known.counts(run.attempt)
            ends_of = {number: rank.metrics_end_bytes for number, rank in run.ranks.items() if rank.metrics_end_bytes}
            self._ends |= {(run.attempt, number): (counts.get(number, 0), end) for number, end in ends_of.items()}
        self.next_request = self._request(attempt)

    def _request(self, attempt: int) -> PollRequest:
        """The question for what is not known here yet of an attempt."""
        counts = self.gathered.known.counts(attempt)
        request = node_matching.poll_request(self._paths.name, tail_lines=200, known_lines=counts)
        # Lines that are not known here any more, because somebody has damaged the file, are asked for by their number.
        ends = {str(rank): end for (of, rank), (count, end) in self._ends.items() if of == attempt and counts.get(rank, 0) >= count}
        return request.replace(lines_of_attempt=attempt, after_bytes=ends)

    def _tell(self, event: events.Event) -> None:
        """Write down what happened, unless the supervisor on a node has written it down last."""
        lines = event_log.lines(self._paths)
        last = events.read(lines[-1]) if lines else None
        if last is None or (last.kind, last.values) != (event.kind, event.values):
            event_log.append(self._paths, event)

    def _lacks(self, resume_step: int) -> bool:
        """Whether steps up to there, or the loss before the first, never came here: nobody looked, or the machine that had them is gone."""
        if not resume_step:
            return False
        known = self.gathered.known
        return not (known.has_steps("train", 0, 1, resume_step) and known.has_steps("eval", 0, 0, 0))


def keep(paths: RunPaths, answers: Mapping[str, dict[str, Any]], gathered: Gathered | None = None) -> None:
    """Have here what ranks have measured, of answers to `poll`: after a fault it may never be asked again."""
    ranks = [rank for answer in answers.values() if answer.get("run") for rank in answer["run"].get("ranks", {}).values()]
    # What came before is the run's curve, which is the first rank's here. After the first rank was gone, another one has saved it alone, with its own number.
    before = [{**line, "rank": 0} for rank in ranks for line in rank.get("before", ()) if isinstance(line.get("rank"), int)]
    gathered_metrics = gathered or Gathered(paths)
    gathered_metrics.add([*before, *(line for rank in ranks for line in rank.get("metrics", ()))], run_folder.resume_steps(paths))


def until_end(fleet: Fleet, paths: RunPaths, *, console: Console, options: Options) -> int:
    """Look until the run ends: the dashboard on a terminal, a line per change elsewhere. Who looks ends nothing: Ctrl-C and the key q leave the run alone.

    `options` are those of the commands that are shown. Returns the exit code: 0 done (and after the key q), 1 failed or stopped, 3 when the nodes
    cannot be asked any more, 130 after Ctrl-C.
    """
    watcher = Watcher(fleet, paths)
    again = homelab("status --wait", paths.name).with_options(options)
    watched = live_dashboard.watch(
        lambda: watcher.look().with_options(options), console, refresh_s=INTERVAL_S, on_leave=watcher.leave, again=again
    )
    snapshot = watched.last
    if watched.end != "over" or snapshot is None:
        return EXIT_DONE if watched.end == "left" else ToldExit(EXIT_INTERRUPTED)
    if not live_dashboard.can_draw(console):
        if snapshot.diagnosis is not None:
            console.print(cause.render(snapshot.diagnosis))
        for entry in snapshot.next_commands:
            console.print(f"  {entry.purpose:8} {entry.command}", markup=False, highlight=False, soft_wrap=True)
    return {"done": EXIT_DONE, "lost": EXIT_UNREACHABLE}.get(snapshot.state, EXIT_FAILED)
