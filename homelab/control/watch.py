"""Looking at a run: one question to every node, the answers kept in the run's folder, a Snapshot out."""

from __future__ import annotations

import statistics
import time
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from homelab.control import diagnosed, find, head_supervisor, stop
from homelab.dashboard import live as live_dashboard
from homelab.dashboard import snapshot as snapshots
from homelab.dashboard.snapshot import Snapshot
from homelab.diagnose import cause
from homelab.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import lock, store, unattended
from homelab.runs import reply as replies
from homelab.runs.paths import RunPaths
from homelab.runs.reply import Metric, Reply, SupervisorReply, event_of
from homelab.runs.standing import standing
from homelab.runs.state import FINISHED, newest_attempt

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
        self._kept = [line for line in store.read_lines(paths.metrics_jsonl) if _is_metric(line)]
        self.replies: dict[str, Reply] = {}
        self.unreachable: dict[str, str] = {}
        self.without_supervisor: tuple[str, ...] = ()
        """What the owner has to know because nobody looks after the run; empty while somebody does, or need not."""

    def look(self) -> Snapshot:
        """Ask every node of the plan once; gather metrics, write down the state when it changed."""
        plan = find.plan_of(self._paths)
        self._ask([node.name for node in plan.nodes])
        if newest_attempt(self.replies) > plan.attempt:
            # Another controller recovered this run: its plan is on the nodes.
            plan = find.refresh(self._fleet, self._paths, next(iter(self.replies)))
            self._ask([node.name for node in plan.nodes])
        before = store.read_object(self._paths.state_json).get("state")
        on_nodes = self._supervisors_on_nodes()
        self._gather_events(on_nodes)
        seen = snapshots.build(
            run=self._paths.name,
            recipe=self._described.get("recipe_file", ""),
            replies=self.replies,
            unreachable=self.unreachable,
            now=time.time(),
            plan=plan,
            metrics=[Metric.model_validate(line) for line in self._kept],
            events=store.events(self._paths),
            intent=store.intent_of(self._paths, plan.attempt),  # type: ignore[arg-type]
            is_script=self._is_script,
            diagnosis=self.diagnosis() if self._has_failed(plan.attempt) else None,
            supervisor=self._supervisor(on_nodes),
            options=self._options,
        )
        self.without_supervisor = self._without_supervisor(seen, plan)
        seen = seen.model_copy(update={"notes": (*seen.notes, *self.without_supervisor)})
        if seen.state != before:
            store.set_state(self._paths, seen.state, seen.attempt)
            self._tell(seen.state if seen.diagnosis is None else f"{seen.state}: {seen.diagnosis.title}")
        if seen.state == "failed" and seen.diagnosis is not None:
            diagnosed.keep(self._paths, seen.attempt, seen.diagnosis, self.unreachable)
        return seen

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
            return str(SupervisorReply(alive=True, doing=replies.plain(str(known.get("doing", ""))), why=replies.plain(str(known.get("why", "")))))
        return next((f"{said} (on {name})" for name, said in on_nodes.items() if said.alive), "")

    def _without_supervisor(self, seen: Snapshot, plan: Plan) -> tuple[str, ...]:
        if seen.supervisor:
            return ()
        place = head_supervisor.recorded(self._paths)
        silent = f"{place} does not answer" if place in self.unreachable else f"none is at work on {place} any more"
        steps_s = [line["step_s"] for line in self._kept if line.get("attempt") == seen.attempt and line.get("step_s")]
        still = standing(seen.attempt, [node.name for node in plan.nodes], self.replies, statistics.median(steps_s) if steps_s else None)
        of_run = f"{seen.run}{self._options}"
        return unattended.notes(
            seen.state, store.read_object(self._paths.supervisor_json), silent if place else "", still,
            recover=f"homelab recover {of_run}", supervise=f"homelab supervise {of_run}",
        )  # fmt: skip

    def diagnosis(self) -> cause.Diagnosis | None:
        """What the newest answers say about a failure."""
        return diagnosed.make(self._fleet.cluster, self._paths, self.replies, self.unreachable, options=self._options)

    def _has_failed(self, attempt: int) -> bool:
        parts = [entry.run for entry in self.replies.values() if entry.run and entry.run.attempt == attempt]
        ended_badly = any(part.exit and not part.exit.is_success and not part.exit.stopped for part in parts)
        return (
            ended_badly
            or bool(self.unreachable)
            or any(part.started_at and not part.is_alive and part.exit is None for part in parts)
        )

    def _ask(self, names: list[str]) -> None:
        known = {node.name for node in self._fleet.cluster.nodes}
        attempt = find.plan_of(self._paths).attempt
        known_lines: dict[str, int] = {}
        for kind, its_attempt, rank, *_ in {_key(line) for line in self._kept}:
            if kind and its_attempt == attempt:
                known_lines[str(rank)] = known_lines.get(str(rank), 0) + 1
        request = {"run": self._paths.name, "lines_of_attempt": attempt, "after_lines": known_lines, "tail_lines": 200}
        answers, errors = self._fleet.ask(
            "poll", request, names=[name for name in names if name in known], timeout_s=_POLL_TIMEOUT_S
        )
        self.replies = replies.parse_replies(answers)
        self.unreachable = {name: error.message for name, error in errors.items()}
        self.unreachable |= {name: "it is not in cluster.toml" for name in names if name not in known}
        self._keep(
            [
                line
                for answer in answers.values()
                if answer["run"]
                for rank in answer["run"]["ranks"].values()
                for line in rank["metrics"]
            ]
        )

    def _tell(self, what: str) -> None:
        """Write down what happened, unless the supervisor on a node has written it down last."""
        known = store.events(self._paths)
        if not known or known[-1].get("what") != what:
            store.event(self._paths, what)

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        have = {_key(line) for line in self._kept}
        new = [line for line in lines if _key(line) not in have]
        self._kept += new
        store.append_lines(self._paths.metrics_jsonl, new)


def until_end(fleet: Fleet, paths: RunPaths, *, console: Console, options: str) -> int:
    """Look until the run ends: the dashboard on a terminal, a line per change elsewhere. Ctrl-C leaves the run alone.

    Returns the exit code: 0 done, 1 failed or stopped, 3 when the nodes cannot be asked any more, 130 after Ctrl-C.
    """
    watcher = Watcher(fleet, paths, options)
    seen = live_dashboard.watch(watcher.look, console, refresh_s=INTERVAL_S, ends=_has_ended)
    if seen is None or not _has_ended(seen):
        return EXIT_INTERRUPTED
    if not console.is_terminal:
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


def _is_metric(line: dict[str, Any]) -> bool:
    """False for a line of a damaged file: the nodes give it again."""
    try:
        Metric.model_validate(line)
    except ValidationError:
        return False
    return True


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return (line.get("kind"), line.get("attempt"), line.get("rank"), line.get("step"), line.get("message"))
