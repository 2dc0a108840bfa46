"""Looking at a run: one question to every node, the answers kept in the run's folder, a Snapshot out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from homelab.control import by_hand, diagnosed, find, head_supervisor, leftovers, parts, stop
from homelab.dashboard import live as live_dashboard
from homelab.dashboard import snapshot as snapshots
from homelab.dashboard.snapshot import Snapshot
from homelab.diagnose import cause
from homelab.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import lock, store, unattended
from homelab.runs import reply as replies
from homelab.runs.gathered import Gathered
from homelab.runs.paths import RunPaths
from homelab.runs.reply import Metric, Reply, SupervisorReply, event_of
from homelab.runs.standing import standing
from homelab.runs.state import FINISHED, newest_attempt, node_part

INTERVAL_S = 2.0
_POLL_TIMEOUT_S = 15.0


class Watcher:
    """Looks at one run again and again; asks only for what is new."""

    def __init__(self, fleet: Fleet, paths: RunPaths, options: str) -> None:
        self._fleet = fleet
        self._paths = paths
        self._options = options
        self._described = store.read_object(paths.run_json)
        recipe = self._described.get("recipe")
        self._is_script = isinstance(recipe, dict) and bool(recipe.get("script"))
        self._gathered = Gathered(paths)
        self._asked_before: set[int] = set()  # attempts whose head has said what came before them
        self.replies: dict[str, Reply] = {}
        self.unreachable: dict[str, str] = {}
        self.ways: dict[str, str] = {}
        """Node of `unreachable` -> what would make it answer, as its connection said."""
        self.without_supervisor: tuple[str, ...] = ()
        """What the owner has to know because nobody looks after the run; empty while somebody does, or need not."""

    def look(self) -> Snapshot:
        """Ask every node of the plan once; gather metrics, write down the state when it changed."""
        plan = find.plan_of(self._paths)
        self._ask([node.name for node in plan.nodes])
        if newest_attempt(self.replies) > plan.attempt:
            # Another controller recovered this run: its plan is on the nodes.
            plan = find.refresh(self._fleet, self._paths, next(iter(self.replies.values())).node)
            self._ask([node.name for node in plan.nodes])
        before = store.read_object(self._paths.state_json).get("state")
        kept = store.state_of(self._paths, plan.attempt)
        on_nodes = self._supervisors_on_nodes()
        self._gather_events(on_nodes)
        for name, reply in self.replies.items():
            if reply.run and reply.run.secrets_removed:
                leftovers.note(self._paths, name)
        seen = snapshots.build(
            run=self._paths.name,
            recipe=self._described.get("recipe_file", ""),
            replies=self.replies,
            unreachable=self.unreachable,
            now=time.time(),
            plan=plan,
            metrics=[Metric.model_validate(line) for line in self._gathered.lines],
            events=store.events(self._paths),
            intent=store.intent_of(self._paths, plan.attempt),  # type: ignore[arg-type]
            kept=kept,  # type: ignore[arg-type]
            is_script=self._is_script,
            supervisor=self._supervisor(on_nodes),
            options=self._options,
        )
        told = self._told(seen)
        following = snapshots.next_commands(seen.state, seen.run, self._options, told)
        seen = seen.model_copy(update={"diagnosis": told, "next_commands": following})
        self.without_supervisor = self._without_supervisor(seen, plan)
        outliving = unattended.outliving(self.replies, seen.attempt, f"homelab stop {seen.run}{self._options}")
        seen = seen.model_copy(update={"notes": (*seen.notes, *self._off(seen, kept), *self.without_supervisor, *outliving)})
        if seen.state != before:
            store.set_state(self._paths, seen.state, seen.attempt)
            self._tell(seen.state if seen.diagnosis is None else f"{seen.state}: {seen.diagnosis.title}")
        return seen

    def _told(self, seen: Snapshot) -> cause.Diagnosis | None:
        """Why it failed: by what the nodes say, or by what was kept of it where that knows more. It is kept before anybody is told.

        Beside a stop by hand only a reason of the ranks' own is one: that a node is gone today, or let go later, ended nothing.
        """
        found = self.diagnosis() if self._has_failed(seen.attempt) else None
        if found is None:
            return None
        if seen.state in ("stopping", "stopped", "done"):
            return found if found.is_of_a_rank else None
        if seen.state == "failed":
            return diagnosed.keep(self._paths, seen.attempt, found, self.unreachable).diagnosis
        return diagnosed.better(self._paths, seen.attempt, found, self.unreachable).diagnosis if seen.state == "lost" else found

    def _off(self, seen: Snapshot, kept: str | None) -> tuple[str, ...]:
        """What to say of the nodes of a run that is known to have ended, where they cannot be asked any more."""
        if not self.unreachable or seen.state != kept or seen.state not in FINISHED:
            return ()
        are = "it is" if len(self.unreachable) == 1 else "they are"
        return (f"{seen.state}, as was seen before; {', '.join(self.unreachable)} cannot be asked now ({are} off, or unreachable)",)

    def _supervisors_on_nodes(self) -> dict[str, SupervisorReply]:
        """Node -> what it says about a supervisor of this run there, at work or not."""
        found = {name: reply.supervisor for name, reply in self.replies.items() if reply.supervisor}
        if head_supervisor.recorded(self._paths) not in ("", *self.replies, *self.unreachable):  # on a node that takes no part any more
            found |= head_supervisor.look(self._fleet, self._paths)
        return found

    def _gather_events(self, on_nodes: dict[str, SupervisorReply]) -> None:
        """Have here what a supervisor on a node has written down: the node may be off when somebody asks what happened."""
        for said in on_nodes.values():
            store.add_events(self._paths, [event for line in said.events if (event := event_of(line))])

    def _supervisor(self, on_nodes: dict[str, SupervisorReply]) -> str:
        """What the run's supervisor is doing, on this machine or on a node; empty where none is at work."""
        if lock.is_held(self._paths):
            known = store.read_object(self._paths.supervisor_json)  # a person may have spoilt it
            doing = replies.plain(str(known.get("doing") or "watching"))  # nothing is known where the folder was deleted
            return str(SupervisorReply(alive=True, doing=doing, why=replies.plain(str(known.get("why", "")))))
        return next((f"{said} (on {name})" for name, said in on_nodes.items() if said.alive), "")

    def _without_supervisor(self, seen: Snapshot, plan: Plan) -> tuple[str, ...]:
        if seen.supervisor:
            return ()
        place = head_supervisor.recorded(self._paths)
        silent = f"{place} does not answer" if place in self.unreachable else f"none is at work on {place} any more"
        steps_s = [line["step_s"] for line in self._gathered.lines if line.get("attempt") == seen.attempt and line.get("step_s")]
        usual_s = statistics.median(steps_s) if steps_s else None
        still = standing(seen.attempt, [node.name for node in plan.nodes], self.replies, usual_s, plan.step_s)
        of_run = f"{seen.run}{self._options}"
        known = store.read_object(self._paths.supervisor_json)
        return unattended.notes(
            seen.state, known, silent if place else "", still,
            recover=next((entry.command for entry in seen.next_commands if entry.purpose == "launch"), f"homelab recover {of_run}"),
            supervise=f"homelab supervise {of_run}", is_pending=by_hand.is_under_way(known),
        )  # fmt: skip

    def diagnosis(self) -> cause.Diagnosis | None:
        """What the newest answers say about a failure."""
        return diagnosed.make(self._fleet.cluster, self._paths, self.replies, self.unreachable, ways=self.ways, options=self._options)

    def _has_failed(self, attempt: int) -> bool:
        parts = [node_part(entry.run, attempt) for entry in self.replies.values() if entry.run and entry.run.attempt == attempt]
        return bool(self.unreachable) or bool({"failed", "vanished"} & set(parts))

    def _ask(self, names: list[str]) -> None:
        plan = find.plan_of(self._paths)
        attempt = plan.attempt
        known_lines: dict[str, int] = {}
        for line in self._gathered.lines:
            if line.get("kind") and line.get("attempt") == attempt:
                rank = str(line.get("rank"))
                known_lines[rank] = known_lines.get(rank, 0) + 1
        request = {"run": self._paths.name, "lines_of_attempt": attempt, "after_lines": known_lines, "tail_lines": 200}
        request["before"] = attempt not in self._asked_before and self._lacks(plan.resume_step)
        answers, self.unreachable, self.ways = parts.poll(self._fleet, request, names, timeout_s=_POLL_TIMEOUT_S)
        self.replies = replies.parse_replies(answers)
        if any(line for reply in self.replies.values() if reply.run for rank in reply.run.ranks.values() for line in rank.before):
            self._asked_before.add(attempt)
        keep(self._paths, answers, self._gathered)

    def _tell(self, what: str) -> None:
        """Write down what happened, unless the supervisor on a node has written it down last."""
        known = store.events(self._paths)
        if not known or known[-1].get("what") != what:
            store.event(self._paths, what)

    def _lacks(self, resume_step: int) -> bool:
        """Whether steps up to there, or the loss before the first, never came here: nobody looked, or the machine that had them is gone."""
        if not resume_step:
            return False
        lines = [line for line in self._gathered.lines if line.get("rank") == 0]
        done = {line.get("step") for line in lines if line.get("kind") == "train"}
        evaluated = {line.get("step") for line in lines if line.get("kind") == "eval"}
        return not (done >= set(range(1, resume_step + 1)) and 0 in evaluated)


def keep(paths: RunPaths, answers: Mapping[str, dict[str, Any]], gathered: Gathered | None = None) -> None:
    """Have here what ranks have measured, of answers to `poll`: after a fault it may never be asked again."""
    ranks = [rank for answer in answers.values() if answer.get("run") for rank in answer["run"]["ranks"].values()]
    known = gathered or Gathered(paths)
    known.add([line for rank in ranks for line in (*rank.get("before", ()), *rank["metrics"])], find.resumed(paths))


def until_end(fleet: Fleet, paths: RunPaths, *, console: Console, options: str) -> int:
    """Look until the run ends: the dashboard on a terminal, a line per change elsewhere. Ctrl-C leaves the run alone.

    Returns the exit code: 0 done, 1 failed or stopped, 3 when the nodes cannot be asked any more, 130 after Ctrl-C.
    """
    watcher = Watcher(fleet, paths, options)
    seen = live_dashboard.watch(watcher.look, console, refresh_s=INTERVAL_S, ends=_has_ended)
    if seen is None or not _has_ended(seen):
        return EXIT_INTERRUPTED
    if not live_dashboard.can_draw(console):
        if seen.diagnosis is not None:
            console.print(cause.render(seen.diagnosis))
        for entry in seen.next_commands:
            console.print(f"  {entry.purpose:8} {entry.command}", markup=False, highlight=False, soft_wrap=True)
    return {"done": EXIT_DONE, "lost": EXIT_UNREACHABLE}.get(seen.state, EXIT_FAILED)


def wait(fleet: Fleet, paths: RunPaths, *, console: Console, options: str) -> int:
    """`until_end` for who started the run: an attempt that failed fails as a whole, so what is left of it is ended.

    (Ranks that had not begun to train wait long for the one that is missing, and hold their cards meanwhile.)
    """
    code = until_end(fleet, paths, console=console, options=options)
    if code == EXIT_FAILED:
        outcome = stop.stop(fleet, paths, lambda text: None)
        for line in outcome.lines() if outcome.exit_code != EXIT_DONE else ():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code


def _has_ended(seen: Snapshot) -> bool:
    """With a supervisor a failure is not the end: it goes on, or gives up and leaves."""
    return seen.state in ("done", "stopped") or (seen.state in (*FINISHED, "lost") and not seen.supervisor)
