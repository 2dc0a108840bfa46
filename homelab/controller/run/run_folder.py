"""What the controller's folder of a run says: its recipe, its plans, its state. A folder that is not whole is repaired from the nodes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.poll_reply import is_moment
from homelab.controller.run import adoption, event_log, run_record, store
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.run_record import plan_in, recipe_in
from homelab.controller.run.state import State
from homelab.shared.protocol import layout
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.run_messages import Reply

_FEW = 8  # attempts


@dataclass(frozen=True)
class _Outline:
    """Of a plan; `mark`: what its file was on the disk when it was read."""

    mark: tuple[int, int, int]
    resume_step: int
    head: str


_outlines: dict[Path, _Outline] = {}


@dataclass(frozen=True)
class Description:
    """run.json as it is written, and the recipe in it."""

    run_json: Mapping[str, Any]
    recipe: Recipe


def description_of(paths: RunPaths) -> Description:
    """Raises HomelabError when the run's folder is damaged, or another version's."""
    run_json = store.read_object(paths.run_json)
    run_record.refuse_other(run_json, str(paths.root), _aside(paths, "old"))
    recipe = recipe_in(run_json)
    if recipe is None:
        is_there = os.path.exists(paths.run_json)
        raise damaged(
            paths,
            f"run.json is damaged ({run_record.fault(run_json)})"
            if run_json
            else "run.json is damaged"
            if is_there
            else "it has no run.json",
        )
    return Description(run_json, recipe)


def refuse_scores(paths: RunPaths) -> None:
    """Raises InputError for a run whose result scores answers: it writes no text."""
    objective = description_of(paths).recipe.objective
    if objective is not None and objective.scores:
        raise InputError(
            "this is a reward model: it scores answers and writes no text", where=f"{paths.name}: [objective] kind",
            hint=Hint("{} brings it, and AutoModelForSequenceClassification (of adapters: PEFT's AutoPeftModelForSequenceClassification) loads it", homelab("fetch", paths.name)),
        )  # fmt: skip


def state_of(paths: RunPaths) -> str:
    """The state as this controller last saw it, "planned" where that cannot be read."""
    state = store.read_object(paths.state_json).get("state")
    return state if isinstance(state, str) and state in get_args(State) else "planned"


def is_stopped(paths: RunPaths, attempt: int) -> bool:
    """Whether a person has stopped this attempt here, or one after it: a start that did not come to its end has left the plan of one."""
    record = store.read_object(paths.state_json)
    by = record.get("attempt")
    return isinstance(by, int) and by >= attempt and record.get("intent") in ("stopping", "stopped")


def created_at(paths: RunPaths) -> float:
    """Seconds since 1970 by the clock of the machine that launched it; 0 where that cannot be read."""
    moment = store.read_object(paths.run_json).get("created_at")
    return float(moment) if isinstance(moment, int | float) and is_moment(moment) else 0.0


def moment_of(described: Mapping[str, Any]) -> datetime | None:
    """When the run was launched, as its chat templates are told it; None where that cannot be read."""
    try:
        return datetime.fromisoformat(described["moment"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def attempts(paths: RunPaths) -> list[int]:
    """Numbers of the attempts that have a folder here, the newest first."""
    folder = paths.root / layout.ATTEMPTS
    return sorted((int(name) for name in (os.listdir(folder) if folder.is_dir() else ()) if name.isdecimal()), reverse=True)


def plan_of(paths: RunPaths, attempt: int | None = None) -> Plan:
    """The plan of an attempt, the newest that can be read by default. Raises HomelabError when the run's folder is damaged."""
    for number in [attempt] if attempt else attempts(paths):
        plan = _read_plan(paths, number)
        if plan is not None:
            return plan
    raise damaged(paths, "it has no readable plan")


def resume_steps(paths: RunPaths) -> dict[int, int]:
    """Attempt -> the step after which it went on, of the plans that can be read."""
    return {number: outline.resume_step for number, outline in _outlines_of(paths)}


def heads(paths: RunPaths) -> list[str]:
    """Every head that the run has had, the newest first."""
    return list(dict.fromkeys(outline.head for _, outline in _outlines_of(paths)))


def _outlines_of(paths: RunPaths) -> Iterator[tuple[int, _Outline]]:
    """Of the plans that can be read, the newest first. Each is read once: a run of months has thousands, and every look asks for them."""
    for number in attempts(paths):
        file = paths.plan_json(number)
        try:
            status = os.stat(file)
        except OSError:
            continue
        mark = (status.st_mtime_ns, status.st_size, status.st_ino)
        kept = _outlines.get(file)
        if kept is None or kept.mark != mark:
            plan = _read_plan(paths, number)
            if plan is None:
                continue
            kept = _outlines[file] = _Outline(mark, plan.resume_step, plan.head)
        yield number, kept


def last_layers(paths: RunPaths) -> dict[tuple[str, int], range]:
    """(node, its card) -> the layers that this rank of a pipeline had in the newest attempt in which it was, of the last few."""
    found: dict[tuple[str, int], range] = {}
    for plan in filter(None, (_read_plan(paths, number) for number in attempts(paths)[:_FEW])):
        for rank in plan.ranks:
            if rank.stage is not None:
                found.setdefault((rank.node, rank.local_rank), range(rank.stage.begin, rank.stage.end))
    return found


def _read_plan(paths: RunPaths, number: int) -> Plan | None:
    return plan_in(store.read_json(paths.plan_json(number)), paths.name, number)


def is_whole(paths: RunPaths) -> bool:
    """False when run.json or the newest plan cannot be read."""
    numbers = attempts(paths)
    if recipe_in(store.read_object(paths.run_json)) is None:
        return False
    return bool(numbers) and _read_plan(paths, numbers[0]) is not None


def damaged(paths: RunPaths, damage: str) -> HomelabError:
    """The error for a folder that cannot be used."""
    return HomelabError(
        f"this run's folder is damaged: {damage}, and no node that answers has it",
        where=str(paths.root),
        hint=Hint("move it away: {}; if a node of the run is off: {}", _aside(paths, "damaged"), homelab("preflight --only ssh")),
    )


def _aside(paths: RunPaths, suffix: str) -> str:
    place = shlex.quote(str(paths.root))
    return f"mv {place} {place}.{suffix}"


def repair(fleet: Fleet, paths: RunPaths, say: Say) -> None:
    """Take what cannot be read of run.json and the plans from the nodes. Does nothing for a whole folder.

    An attempt of which only its number is left, here and on all nodes, did not come to its start: the plan before it counts.
    Raises HomelabError when no node that answers has what is missing, or when they do not agree on it, and for a run of another version.
    """
    run_record.refuse_other(store.read_object(paths.run_json), str(paths.root), _aside(paths, "old"))
    if is_whole(paths):
        return
    say(f"the folder of {paths.name} is damaged: asking the nodes for it")
    answers, unreachable = fleet.ask("describe", RunRequest(run=paths.name))
    newest_on_nodes = max((int(number) for answer in answers.values() for number in answer["plans"]), default=0)
    if recipe_in(store.read_object(paths.run_json)) is None:
        adoption.take_description(fleet, paths, answers)
    for node, answer in answers.items():
        taken = adoption.take_plans(paths, answer["plans"])
        if taken:
            event_log.append(paths, event("mended", node=node, files=", ".join(f"the plan of attempt {number}" for number in taken)))
    if is_whole(paths):
        return
    description_of(paths)
    if not unreachable and plan_of(paths).attempt >= newest_on_nodes:
        return
    raise damaged(paths, f"{paths.plan_json(max([newest_on_nodes, *attempts(paths)])).relative_to(paths.root)} cannot be read")


def refresh(fleet: Fleet, paths: RunPaths, replies: Mapping[str, Reply]) -> Plan:
    """The newest plan of the nodes, kept beside the older ones: another controller may have recovered the run, on some of them."""
    informed = max(replies.values(), key=lambda reply: reply.run.attempt if reply.run else 0)
    adoption.take_plans(paths, fleet.agent(informed.node).ask("describe", RunRequest(run=paths.name))["plans"])
    return plan_of(paths)
