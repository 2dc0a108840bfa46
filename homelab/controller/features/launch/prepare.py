"""Launch: preflight, plan, ship, start. In that order, one direction only; what `plan` prints is what is executed here."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from homelab import __version__
from homelab.controller.attempt import inputs, planner, start
from homelab.controller.base.errors import HomelabError, StoppedError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.checks.machine import runs
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.profile_request import ProfiledSteps
from homelab.controller.config.program_command import Typed
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import preflight
from homelab.controller.planning.types import Plan
from homelab.controller.remote import ship
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import adoption, event_log, fingerprint, run_record, run_schema, signals, store
from homelab.controller.run import supervisor_record as manual_lock
from homelab.controller.run.claims import Claim
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import profile_files, row_forms

_KEEP_COPY_BYTES = 64 << 20


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
    typed: Typed | None = None
    """The command that this is made from, in place of a recipe's file."""
    profiled: ProfiledSteps | None = None
    """The steps that are profiled, None for none."""


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
            where=f"node {first.node}, check {first.check}" if first.node else f"check {first.check}",
            hint=first.hint
            if error is not None or registry.is_certain(first.check)
            else Hint("{}; to go on regardless: --skip {}", first.hint, first.check),
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
            hint=Hint("{}; both at once, where there is room for both: {}", busy[0].hint, " ".join(f"--skip {check}" for check in checks)),
        )


def _refuse_recovered(prepared: Prepared) -> None:
    """Raises HomelabError where a run is between two attempts on these nodes: their memory looks free, and is about to be taken."""
    if "runs.alive" in prepared.skipped:
        return
    for name, facts in prepared.evidence.facts.items():
        for run, supervisor in facts.runs.recovered.items():
            raise HomelabError(
                runs.recovered(run, supervisor).replace(" here", f" on {name}", 1), where=f"node {name}, check runs.alive",
                hint=Hint("start after it: {}; to end it: {}; both at once, where there is room for both: --skip runs.alive", runs.after(run), homelab("stop", run)),
            )  # fmt: skip


def launch(
    fleet: Fleet,
    claim: Claim,
    prepared: Prepared,
    runs_dir: Path,
    *,
    wants_supervisor: bool,
    say: Say,
    announce: Callable[[RunPaths], None],
) -> RunPaths:
    """Write the run's folder, ship, start with the claim on it. On any failure or Ctrl-C nothing is left running, and the run says `failed` or `stopped`.

    `announce` tells the person the run's name. A Ctrl-C cannot come between the start and it: otherwise the
    run would go on without the person knowing its name.
    """
    plan = prepared.plan
    assert plan is not None
    paths = RunPaths(runs_dir / plan.run)
    run_json = describe(prepared, fleet.cluster, plan)
    store.write_json(paths.run_json, run_json)
    store.write_text(paths.readme_txt, store.README)
    store.write_json(paths.cluster_json, fleet.cluster.model_dump(mode="json"))
    store.write_json(
        paths.checks_json,
        {
            "skipped": sorted(prepared.skipped),
            "findings": [finding.as_dict() for finding in prepared.findings],
            adoption.RUN_DIGEST: run_record.digest(run_json),
        },
    )
    _snapshot(paths, prepared)
    manual_lock.told(paths, manual_lock.LAUNCHING, wants_supervisor)
    start.keep(paths, fleet, plan)
    store.set_state(paths, "shipping", plan.attempt)
    names = [node.name for node in plan.nodes]
    event_log.append(
        paths, event("launched", plan.attempt, recipe=prepared.recipe_path.name, nodes=names, skipped=sorted(prepared.skipped))
    )
    with _failure_written_down(paths, plan):
        for note in start.ship_material(fleet, [node.name for node in plan.nodes], prepared.material, say):
            event_log.append(paths, event("note", text=note))
    with signals.held():
        with _failure_written_down(paths, plan):
            _refuse_stopped(paths, plan)
            store.set_state(paths, "starting", plan.attempt)
            start.start(fleet, claim, plan, run_json, prepared.material, say)
        store.set_state(paths, "running", plan.attempt)
        shares = {str(rank.rank): rank.share for rank in plan.ranks}
        event_log.append(paths, event("attempt-started", plan.attempt, head=plan.head, port=plan.master_port, shares=shares))
        announce(paths)
    return paths


def _refuse_stopped(paths: RunPaths, plan: Plan) -> None:
    """On another machine the nodes refuse it; here it costs nothing to look."""
    if store.intent_of(paths, plan.attempt) in ("stopping", "stopped"):
        raise StoppedError(
            "the run was stopped by hand while it was being launched",
            where=paths.name,
            hint=Hint("nothing was started; to start it: {}", homelab("recover", paths.name, "--from-scratch")),
        )


@contextmanager
def _failure_written_down(paths: RunPaths, plan: Plan) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        store.set_state(paths, "stopped", plan.attempt, intent="stopped")
        event_log.append(paths, event("interrupted", plan.attempt))
        raise
    except StoppedError as error:
        store.set_state(paths, "stopped", plan.attempt, intent="stopped")
        event_log.append(paths, event("start-stopped", plan.attempt, error=str(error)))
        raise
    except BaseException as error:
        store.set_state(paths, "failed", plan.attempt)
        event_log.append(paths, event("start-failed", plan.attempt, error=str(error)))
        raise


def describe(prepared: Prepared, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """run.json: what never changes in a run."""
    described: dict[str, Any] = {"train": None, "eval": None}
    for item in prepared.material:
        described[item.role] = {
            "kind": "hub" if item.kind == "hub" else "file",
            "sent": item.kind,
            "path": _path_of(item, prepared),
            "name": item.local.name if item.local else None,
            "sha256": digest_of(item, prepared.evidence),
            **item.place,
            **(asdict(item.hub) if item.hub is not None else {}),
        }
    digests = tuple(sorted(f"{role}:{entry['sha256']}" for role, entry in described.items() if entry))
    return {
        "schema": run_schema.SCHEMA,
        "name": plan.run,
        "created_at": time.time(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": prepared.recipe.model_dump(mode="json"),
        "recipe_file": prepared.recipe_path.name,
        **({"typed": asdict(prepared.typed)} if prepared.typed else {}),
        **({profile_files.REQUEST: asdict(prepared.profiled)} if prepared.profiled else {}),
        row_forms.RULES_KEY: row_forms.RULES,
        "recipe_hash": prepared.recipe.law_hash(digests),
        "data": described,
        "model": fingerprint.model_record(
            next((facts.model for facts in prepared.evidence.facts.values() if facts.model and facts.model.found), None)
        ),
        "versions": {
            name: {"python": facts.python.version, **{key: value for key, value in facts.python.packages.items() if value}}
            for name, facts in prepared.evidence.facts.items()
        },
        "homelab": __version__,
        "git_revision": _git_revision(),
        "code_hash": ship.archive()[0],
        "cluster_name": cluster.name,
    }


def _path_of(item: inputs.RecipeInput, prepared: Prepared) -> str:
    """Where the person has this file: not where a command's folder was copied to."""
    if prepared.typed is None or item.local is None or not item.local.is_relative_to(prepared.recipe_path.parent):
        return item.path
    return str(Path(prepared.typed.folder) / item.local.relative_to(prepared.recipe_path.parent))


def digest_of(item: inputs.RecipeInput, evidence: Evidence) -> str:
    """What identifies the content: the file's sha256 (as a node saw it, for files that lie there), or what is loaded from the hub."""
    if item.identity:
        return item.identity
    digests = {facts.data[item.role].sha256 for facts in evidence.facts.values() if item.role in facts.data} - {None}
    # The data check fails when nodes differ; one that is skipped on purpose still gets one stable digest.
    return min((digest for digest in digests if digest), default="missing")


def _snapshot(paths: RunPaths, prepared: Prepared) -> None:
    """The recipe as it was, and what was shipped (while small): recovery from this folder needs no other file."""
    shipped = [(item.local, item.name) for item in prepared.material if item.local]
    for source, name in [(prepared.recipe_path, prepared.recipe_path.name), *shipped]:
        if source.stat().st_size <= _KEEP_COPY_BYTES:
            store.copy(source, paths.code / name)


def _git_revision() -> str | None:
    try:
        completed = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
