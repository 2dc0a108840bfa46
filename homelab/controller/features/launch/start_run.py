"""The start of a run that was checked and planned: its folder is written, its files are shipped, its ranks are started."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from homelab.controller.attempt import start
from homelab.controller.base.errors import StoppedError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.features.launch.run_description import describe
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import adoption, event_log, run_record, signals, store, supervisor_record
from homelab.controller.run.claims import Claim
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths

_KEEP_COPY_BYTES = 64 << 20


def start_run(
    fleet: Fleet,
    claim: Claim,
    prepared: Prepared,
    runs_dir: Path,
    *,
    wants_supervisor: bool,
    say: Say,
    announce: Callable[[RunPaths], None],
) -> RunPaths:
    """Write the run's folder, ship, start with the claim on it. On any failure or Ctrl-C nothing is left running, and the run says `failed` or `stopped`;
    before its folder is whole, there is none.

    `announce` tells the person the run's name. A Ctrl-C cannot come between the start and it: otherwise the
    run would go on without the person knowing its name.
    """
    plan = prepared.plan
    assert plan is not None
    paths = RunPaths(runs_dir / plan.run)
    run_json = prepared.described or describe(prepared, fleet.cluster, plan)
    with _whole_or_gone(paths):
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
        supervisor_record.record_holder(paths, supervisor_record.LAUNCHING, wants_supervisor)
        start.write_attempt_files(paths, fleet, plan)
        store.write_json(paths.run_json, run_json)  # the last one: by it the folder is a run
        store.set_state(paths, "shipping", plan.attempt)
        names = [node.name for node in plan.nodes]
        event_log.append(
            paths, event("launched", plan.attempt, recipe=prepared.recipe_path.name, nodes=names, skipped=sorted(prepared.skipped))
        )
    with _failure_written_down(paths, plan):
        for note in start.ship_material(fleet, names, prepared.material, say):
            event_log.append(paths, event("note", text=note))
    with signals.held():
        with _failure_written_down(paths, plan):
            _refuse_stopped(paths, plan)
            store.set_state(paths, "starting", plan.attempt)
            start.start(fleet, claim, plan, prepared.recipe, run_json, prepared.material, say)
        store.set_state(paths, "running", plan.attempt)
        shares = {str(rank.rank): rank.share for rank in plan.ranks}
        event_log.append(paths, event("attempt-started", plan.attempt, head=plan.head, port=plan.master_port, shares=shares))
        announce(paths)
    return paths


def _refuse_stopped(paths: RunPaths, plan: Plan) -> None:
    """On another machine the nodes refuse it; here it costs nothing to look."""
    if store.intent_of(paths, plan.attempt) in ("stopping", "stopped"):
        raise StoppedError(
            "the run was stopped by hand during its launch",
            where=paths.name,
            hint=Hint("nothing is running; to start it: {}", homelab("recover", paths.name, "--from-scratch")),
        )


@contextmanager
def _whole_or_gone(paths: RunPaths) -> Iterator[None]:
    """Half of a folder could be neither shown nor recovered, and nothing of the run is anywhere else yet."""
    try:
        yield
    except BaseException:
        with signals.held():
            shutil.rmtree(paths.root, ignore_errors=True)
        raise


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


def _snapshot(paths: RunPaths, prepared: Prepared) -> None:
    """The recipe as it was, and what was shipped (while small): recovery from this folder needs no other file."""
    files = [(item.local, item.name, str(item.sha256)) for item in prepared.material if item.local]
    if prepared.recipe_text is None:
        files.append((prepared.recipe_path, prepared.recipe_path.name, ""))
    else:
        store.write_text(paths.code / prepared.recipe_path.name, prepared.recipe_text)
    kept: set[str] = set()
    for source, name, sha256 in files:
        if source.stat().st_size <= _KEEP_COPY_BYTES:  # rows to train on and held-out ones may have one name in two folders
            store.copy(source, paths.code / sha256 / name if name in kept else paths.code / name)
            kept.add(name)
