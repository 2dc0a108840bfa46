"""Launch: preflight, plan, ship, start. In that order, one direction only; what `plan` prints is what is executed here."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import homelab
from homelab.checks import ssh
from homelab.checks.evidence import Evidence, Finding
from homelab.config.cluster import Cluster
from homelab.config.recipe import Recipe
from homelab.control import by_hand, gather, interrupts, material, preflight, start
from homelab.control.claims import Claim
from homelab.control.material import Material
from homelab.errors import HomelabError, StoppedError
from homelab.facts import Facts
from homelab.planning import plan as planning
from homelab.planning.model import Plan
from homelab.planning.outlook import Throughputs
from homelab.remote import ship
from homelab.remote.fanout import Fleet
from homelab.runs import identity, store
from homelab.runs.paths import RunPaths

Say = Callable[[str], None]
_KEEP_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """Everything known before the first byte is shipped."""

    recipe: Recipe
    recipe_path: Path
    material: list[Material]
    evidence: Evidence
    findings: list[Finding]
    plan: Plan | None
    refused: HomelabError | None
    """Why there is no plan, when there is none."""


def prepare(
    fleet: Fleet, recipe: Recipe, recipe_path: Path, *, name_beside: Callable[[set[str]], str], skip: Collection[str], say: Say
) -> Prepared:
    """Facts, checks and plan. `name_beside` gives the run's name, told the names of the runs that the nodes have already:
    another controller may have launched the same recipe in the same minute. Raises InputError for a recipe whose files are
    not there.
    """
    items = material.of_recipe(recipe, recipe_path)
    named: list[str] = []

    def plan_on(seen: Evidence, wanted: Recipe) -> Plan:
        if not named:
            answers, _ = fleet.ask("runs", names=list(seen.facts))
            named.append(name_beside({entry["name"] for answer in answers.values() for entry in answer["runs"]}))
        return make_plan(seen, wanted, _pinned(items, seen), run=named[0], attempt=1, port=wanted.parallel.port, resume_step=0)

    found = preflight.look(fleet, recipe, items, skip=skip, test_collective="when-changed", plan_on=plan_on, say=say)
    return Prepared(found.recipe or recipe, recipe_path, _pinned(items, found.evidence), found.evidence, found.findings, found.plan, found.refused)


def _pinned(items: list[Material], seen: Evidence) -> list[Material]:
    files = seen.sample.files if seen.sample is not None else {}
    return material.pinned(items, {role: file.revision for role, file in files.items() if file.revision})


def make_plan(
    seen: Evidence, recipe: Recipe, items: list[Material], *, run: str, attempt: int, port: int, resume_step: int
) -> Plan:
    """The pure plan, from what was seen."""
    return plan_of(
        gather.reachable(seen.cluster, seen), seen.facts, seen.throughputs, recipe, items,
        run=run, attempt=attempt, port=port, resume_step=resume_step,
    )  # fmt: skip


def plan_of(
    cluster: Cluster, facts: Mapping[str, Facts], throughputs: Throughputs, recipe: Recipe, items: list[Material], *,
    run: str, attempt: int = 1, port: int, resume_step: int = 0,
) -> Plan:  # fmt: skip
    """The pure plan on all nodes of `cluster`; without facts (offline), or for machines that nobody has yet."""
    script = next((item for item in items if item.role == "script"), None)
    return planning.make(
        cluster, recipe, facts, run=run, attempt=attempt, port=port, resume_step=resume_step,
        code_dir=ship.code_dir, script_path=script.node_path if script else None,
        data=material.files_of(items), throughputs=throughputs,
    )  # fmt: skip


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
        if error is None and not first.node and first.check == ssh.LOGIN.id:  # said of this machine, where no node is reached
            error = next(iter(unreachable.values()), None)
        raise (type(error) if error else HomelabError)(
            f"preflight failed: {first.message}{more}",
            where=f"node {first.node}, check {first.check}" if first.node else f"check {first.check}",
            hint=f"{first.hint}; to go on regardless: --skip {first.check}" if error is None else first.hint,
        )
    if prepared.refused:
        raise prepared.refused
    for name, error in prepared.evidence.unreachable.items():
        raise type(error)(
            error.message,
            where=error.where or f"node {name}",
            hint=f"{error.hint}; or leave it out: --nodes {','.join(prepared.evidence.facts)}",
        )


def launch(
    fleet: Fleet, claim: Claim, prepared: Prepared, runs_dir: Path, *, wants_supervisor: bool, skipped: Collection[str], plan_text: str, say: Say,
    announce: Callable[[RunPaths], None],
) -> RunPaths:  # fmt: skip
    """Write the run's folder, ship, start with the claim on it. On any failure or Ctrl-C nothing is left running, and the run says `failed` or `stopped`.

    `announce` tells the person the run's name. A Ctrl-C cannot come between the start and it: a run that nobody was told of
    would run on unseen.
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
        {"skipped": sorted(skipped), "findings": [finding.as_dict() for finding in prepared.findings]},
    )
    _snapshot(paths, prepared)
    by_hand.told(paths, by_hand.LAUNCHING, wants_supervisor)
    start.keep(paths, fleet, plan, plan_text)
    store.set_state(paths, "shipping", plan.attempt)
    store.event(
        paths,
        "launched",
        recipe=prepared.recipe_path.name,
        nodes=[node.name for node in plan.nodes],
        skipped=sorted(skipped),
    )
    with _failure_written_down(paths, plan):
        for note in start.ship_material(fleet, [node.name for node in plan.nodes], prepared.material, say):
            store.event(paths, note)
    with interrupts.held():
        with _failure_written_down(paths, plan):
            _refuse_stopped(paths, plan)
            store.set_state(paths, "starting", plan.attempt)
            start.start(fleet, claim, plan, run_json, prepared.material, say)
        store.set_state(paths, "running", plan.attempt)
        store.event(
            paths,
            f"attempt {plan.attempt} started",
            head=plan.head,
            port=plan.master_port,
            shares={str(rank.rank): rank.share for rank in plan.ranks},
        )
        announce(paths)
    return paths


def _refuse_stopped(paths: RunPaths, plan: Plan) -> None:
    """On another machine the nodes refuse it; here it costs nothing to look."""
    if store.intent_of(paths, plan.attempt) in ("stopping", "stopped"):
        raise StoppedError(
            "the run was stopped by hand while it was being launched", where=paths.name, hint=f"nothing was started; to start it: homelab recover {paths.name} --from-scratch"
        )


@contextmanager
def _failure_written_down(paths: RunPaths, plan: Plan) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        store.set_state(paths, "stopped", plan.attempt, intent="stopped")
        store.event(paths, "interrupted before it ran")
        raise
    except StoppedError as error:
        store.set_state(paths, "stopped", plan.attempt, intent="stopped")
        store.event(paths, "not started: it was stopped by hand", error=str(error))
        raise
    except BaseException as error:
        store.set_state(paths, "failed", plan.attempt)
        store.event(paths, "the start failed", error=str(error))
        raise


def describe(prepared: Prepared, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """run.json: what never changes in a run."""
    described: dict[str, Any] = {"train": None, "eval": None}
    for item in prepared.material:
        described[item.role] = {
            "kind": "hub" if item.kind == "hub" else "file",
            "sent": item.kind,
            "path": item.path,
            "name": item.local.name if item.local else None,
            "sha256": digest_of(item, prepared.evidence),
            **item.place,
            **(asdict(item.hub) if item.hub is not None else {}),
        }
    digests = tuple(sorted(f"{role}:{entry['sha256']}" for role, entry in described.items() if entry))
    return {
        "schema": 1,
        "name": plan.run,
        "created_at": time.time(),
        "recipe": prepared.recipe.model_dump(mode="json"),
        "recipe_file": prepared.recipe_path.name,
        "recipe_hash": prepared.recipe.law_hash(digests),
        "data": described,
        "model": identity.model_record(next((facts.model for facts in prepared.evidence.facts.values() if facts.model and facts.model.found), None)),
        "versions": {
            name: {"python": facts.python_version, **{key: value for key, value in facts.packages.items() if value}}
            for name, facts in prepared.evidence.facts.items()
        },
        "homelab": homelab.__version__,
        "git_revision": _git_revision(),
        "code_hash": ship.archive()[0],
        "cluster_name": cluster.name,
    }


def digest_of(item: Material, seen: Evidence) -> str:
    """What identifies the content: the file's sha256 (as a node saw it, for files that lie there), or what is loaded from the hub."""
    if item.identity:
        return item.identity
    found = {facts.data[item.role].sha256 for facts in seen.facts.values() if item.role in facts.data} - {None}
    # The data check fails when nodes differ; one that is skipped on purpose still gets one stable digest.
    return min((digest for digest in found if digest), default="missing")


def _snapshot(paths: RunPaths, prepared: Prepared) -> None:
    """The recipe as it was, and what was shipped (while small): recovery from this folder needs no other file."""
    shipped = [(item.local, item.name) for item in prepared.material if item.local]
    for source, name in [(prepared.recipe_path, prepared.recipe_path.name), *shipped]:
        if source.stat().st_size <= _KEEP_COPY_BYTES:
            store.copy(source, paths.code / name)


def _git_revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            stdin=subprocess.DEVNULL,
            cwd=Path(homelab.__file__).parent,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
