"""`homelab queue add`: every job is read, planned and judged; then all are put into the queue, or none is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from homelab.controller.attempt import planner
from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.base.hint import Hint, for_recipe
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config import load
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.interpreter import for_recipe as with_interpreter
from homelab.controller.config.recipe import Recipe, RecipeFile
from homelab.controller.features.preflight import plan_inputs
from homelab.controller.features.preflight.plan_inputs import PlanSources
from homelab.controller.features.queue import hours, job_work, sweep
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.queue.sweep import Setting
from homelab.controller.planning.render import answer
from homelab.controller.planning.types import RankPlan

_MOST_SETTINGS = 500  # characters of what a job differs by, which is for people
# Keys of [train] that decide nothing of the memory of a step.
_WITHOUT_MEMORY = {"learning_rate", "epochs", "steps", "warmup_steps", "schedule", "seed"}
OFFLINE = "no machine answers, so this is planned by cluster.toml; it is planned again when its turn comes"


@dataclass(frozen=True)
class AddRequest:
    """What the person asked for. `nodes`: empty for all; `after`: a number or a run; `settings`: as they were typed behind --set."""

    recipes: Sequence[Path]
    nodes: Sequence[str] = ()
    skip: Sequence[str] = ()
    after: str = ""
    not_before: str = ""
    stop_at: str = ""
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class PlannedJob:
    """A job that is not in the queue yet (its number is 1). `answer`: the first line of its plan; `notes`: what a person should know of it."""

    job: QueuedJob
    answer: str
    notes: tuple[str, ...]


def planned(request: AddRequest, cluster: Cluster, now: float, say: Say) -> list[list[PlannedJob]]:
    """The jobs of each recipe. Raises HomelabError for the first that cannot run: then none is to be added."""
    combinations = sweep.combinations(request.settings)
    not_before, stop_at = hours.window(request.not_before, request.stop_at, now)
    found = []
    for recipe in request.recipes:
        text, _ = load.read_recipe(recipe)  # its own faults, before those of --set
        gathered: dict[str, PlanSources] = {}
        dry_runs: dict[str, tuple[RankPlan, ...]] = {}
        jobs = []
        for settings in combinations:
            frozen = sweep.applied(text, settings)
            training = _parsed(frozen, recipe, settings)
            say(f"planning {recipe.name}{''.join(f' {setting}' for setting in settings)}")
            job = QueuedJob(
                number=1, recipe=str(recipe.resolve()), text=frozen, digests=job_work.digests(training, recipe), nodes=tuple(request.nodes), skip=tuple(request.skip),
                after=request.after, not_before=not_before, stop_at=stop_at, added_at=now, settings=" ".join(map(str, settings))[:_MOST_SETTINGS],
            )  # fmt: skip
            try:
                # Of a sweep the nodes are asked once, unless it names other files or models.
                looked_at = training.model_dump_json(include={"model", "data", "script", "parallel"})
                if looked_at not in gathered:
                    gathered[looked_at] = _gathered(cluster, training, recipe, say)
                jobs.append(_judged(job, training, gathered[looked_at], dry_runs, say))
            except HomelabError as error:
                error.where, error.hint = load.in_file(error.where, recipe), for_recipe(error.hint, str(recipe))
                raise
        found.append(jobs)
    return found


def _parsed(text: str, recipe: Path, settings: Sequence[Setting]) -> Recipe:
    try:
        return load.recipe_of_text(text, recipe)
    except InputError as error:
        if not settings:
            raise
        where = f"{' '.join(f'--set {setting}' for setting in settings)}, {recipe.name}"
        # The lines are those of a text that nobody has seen.
        message = re.sub(r"^(\d+ faults?:\n)?\s*line \d+, ", "", error.message)
        section = settings[-1].key.partition(".")[0]
        page = f"recipe.{section}" if section in RecipeFile.model_fields else "recipe"
        hint = f"choose another key or value; homelab explain {page} lists the keys"
        raise InputError(message, where=where, hint=hint) from error


def _gathered(cluster: Cluster, training: Recipe, recipe: Path, say: Say) -> PlanSources:
    machines = with_interpreter(cluster, training)
    try:
        return plan_inputs.gather_for_plan(machines, training, recipe, offline=False, say=say)
    except UnreachableError:
        of_file = plan_inputs.gather_for_plan(machines, training, recipe, offline=True, say=say)
        return replace(of_file, notes=(OFFLINE, *of_file.notes))


def _judged(job: QueuedJob, training: Recipe, gathered: PlanSources, dry_runs: dict[str, tuple[RankPlan, ...]], say: Say) -> PlannedJob:
    """`dry_runs`: what ranks need by the dry runs so far. One takes seconds, and the jobs of a sweep over rates need the same."""
    gathered = replace(gathered, inputs=replace(gathered.inputs, recipe=training))
    plan = planner.settled(gathered.inputs)[1]
    if not gathered.offline:
        needed = plan.model_dump_json(include={"ranks"}) + training.model_dump_json(exclude={"train": _WITHOUT_MEMORY})
        if needed not in dry_runs:
            dry_runs[needed] = plan_inputs.tried(plan, gathered.inputs, say).ranks
        plan = plan.model_copy(update={"ranks": dry_runs[needed]})
    judged = gathered.judged(plan)
    said = answer.of(plan, judged)
    if judged.runs is False and judged.is_judged:
        raise HomelabError(said, where=f"{job.recipe}{f', {job.settings}' if job.settings else ''}", hint=judged.edit)
    expected_s = plan.time.hours * 3600 if plan.time is not None and plan.time.hours is not None else None
    return PlannedJob(
        job.model_copy(update={"seconds": expected_s}), said, (*gathered.notes, *_would_end_it(job, training, gathered.evidence))
    )


def _would_end_it(job: QueuedJob, training: Recipe, evidence: Evidence | None) -> Iterator[str]:
    """What the job's preflight would refuse it for, if things stay as they are: better said in the evening than found in the morning."""
    if evidence is None:
        return
    # Jobs of a sweep share the answers of the nodes, and each has a recipe of its own.
    for finding in registry.judge_all(replace(evidence, recipe=training), job.skip):
        # A machine that is off now is waited for, and what is busy now will be free.
        if finding.level == "fail" and not finding.is_busy and finding.subject != "fit" and finding.node not in evidence.unreachable:
            hint = for_recipe(finding.hint, job.recipe)
            yield Hint("as things are, it would not begin: {} ({}); to fix it: {}", finding.message, finding.where, hint)


def add(queue: QueueFolder, found: Sequence[Sequence[PlannedJob]]) -> tuple[QueuedJob, ...]:
    """Put them all into the queue, in their order."""

    def numbered(first: int) -> list[QueuedJob]:
        jobs: list[QueuedJob] = []
        for group in found:
            head = first + len(jobs)
            jobs += [
                one.job.model_copy(update={"number": head + place, "sweep": head if len(group) > 1 else 0})
                for place, one in enumerate(group)
            ]
        return jobs

    return queue.add(numbered)
