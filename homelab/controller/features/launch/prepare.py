"""Everything before the first byte is shipped: preflight, plan, and what refuses a launch. What `plan` prints is what `start_run` executes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.attempt import inputs, planner
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.checks.machine import runs
from homelab.controller.config.profile_request import ProfiledSteps
from homelab.controller.config.program_command import TypedCommand
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import preflight
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first byte is shipped."""

    recipe: Recipe
    recipe_path: Path
    material: list[inputs.RecipeInput]
    evidence: Evidence
    findings: list[Finding]
    skipped: Collection[str]
    """Ids of the checks that were not judged."""
    plan: Plan | None
    refused: HomelabError | None
    """Why there is no plan, when there is none."""
    typed: TypedCommand | None = None
    """The command that this is made from, in place of a recipe's file."""
    recipe_text: str | None = None
    """The recipe, if its file may say something else by now."""
    profiled: ProfiledSteps | None = None
    """The steps that are profiled, None for none."""
    described: dict[str, Any] | None = None
    """run.json, if it is that of another run that is computed again."""


def prepare(
    fleet: Fleet, recipe: Recipe, recipe_path: Path, *, name_beside: Callable[[set[str]], str], skip: Collection[str], say: Say
) -> Prepared:
    """Facts, checks and plan. `name_beside` gives the run's name, told the names of the runs that the nodes have already:
    another controller may have launched the same recipe in the same minute. Raises InputError for a recipe whose files are
    not there.
    """
    items = inputs.of_recipe(recipe, recipe_path)

    def name(evidence: Evidence) -> str:
        answers, _ = fleet.ask("runs", names=list(evidence.facts))
        return name_beside({entry["name"] for answer in answers.values() for entry in answer["runs"]})

    result = preflight.look(fleet, recipe, items, skip=skip, test_collective="when-changed", run_name=name, say=say)
    material = planner.pinned(items, result.evidence)
    return Prepared(result.recipe or recipe, recipe_path, material, result.evidence, result.findings, skip, result.plan, result.refused)


def refuse_on_failure(prepared: Prepared) -> None:
    """Raises the error of a preflight that failed, or of a plan that cannot be; unreachable nodes give exit code 3."""
    failed = [finding for finding in prepared.findings if finding.level == "fail"]
    if prepared.refused:  # says in its own words what the check of the fit says of each node
        failed = [finding for finding in failed if finding.subject != "fit"]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more, in the table above)" if len(failed) > 1 else ""
        unreachable = prepared.evidence.unreachable
        error = unreachable.get(first.node)
        if error is None and not first.node and first.check == "ssh.login":  # said of this machine, where no node is reached
            error = next(iter(unreachable.values()), None)
        raise (type(error) if error else HomelabError)(
            f"preflight failed: {first.message}{more}",
            where=first.where,
            hint=first.hint
            if error is not None or registry.is_certain(first.check)
            else Hint("{}; to start anyway: --skip {}", first.hint, first.check),
        )
    _refuse_busy(prepared.findings)
    _refuse_recovered(prepared)
    if prepared.refused:
        raise prepared.refused
    for name, error in prepared.evidence.unreachable.items():
        raise type(error)(
            error.message,
            where=error.where or f"node {name}",
            hint=Hint("{}; or leave it out: --nodes {}", error.hint, ",".join(prepared.evidence.facts)),
        )


def _refuse_busy(findings: Sequence[Finding]) -> None:
    """Raises HomelabError where another training has cards of these nodes: both would run out of memory, or be slow."""
    busy = [finding for finding in findings if finding.is_busy]
    if busy:
        checks = sorted({finding.check for finding in busy})
        raise HomelabError(
            busy[0].message.replace(
                " here", f" on {listed(dict.fromkeys(finding.node for finding in busy if finding.message == busy[0].message))}", 1
            ),
            where=f"node {busy[0].node}, check {busy[0].check}",
            hint=Hint("{}; to run both at once, if there is room: {}", busy[0].hint, " ".join(f"--skip {check}" for check in checks)),
        )


def _refuse_recovered(prepared: Prepared) -> None:
    """Raises HomelabError where a run is between two attempts on these nodes: their memory looks free, and is about to be taken."""
    if "runs.alive" in prepared.skipped:
        return
    for name, facts in prepared.evidence.facts.items():
        for run, supervisor in facts.runs.recovered.items():
            raise HomelabError(
                runs.recovered(run, supervisor).replace(" here", f" on {name}", 1), where=f"node {name}, check runs.alive",
                hint=Hint("start after it: {}; to stop it: {}; to run both at once, if there is room: --skip runs.alive", runs.after(run), homelab("stop", run)),
            )  # fmt: skip
