"""One window as a run of its own: planned, started from the kept checkpoint, watched to its end, and what it has left brought here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.attempt import inputs, planner
from homelab.controller.attempt.placement import SupervisorPlacement
from homelab.controller.attempt.remote_supervisor import SupervisorRequest
from homelab.controller.base import elapsed
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.say import Say
from homelab.controller.checks.evidence import Evidence
from homelab.controller.features.launch import prepare, start_run
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.features.launch.quiet_view import QuietView
from homelab.controller.features.preflight import preflight
from homelab.controller.features.recover import checkpoint_transfer, resume_guards
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.features.status import monitor
from homelab.controller.features.stop import stop
from homelab.controller.features.verify import record_source
from homelab.controller.features.verify.step_record import StepRecord, Window
from homelab.controller.features.verify.window_verdict import WindowCompared, WindowMachines
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims, leave_folder, run_folder, store, supervisor_record
from homelab.controller.run.fingerprint import as_begun
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import chain, profile_files, window

_POLL_S = 1.0
_UNSEEN_S = 300.0  # a switch or a machine may start anew meanwhile
_MOST_RECORD_BYTES, _MOST_COMPARED_BYTES = 1 << 30, 1 << 20


@dataclass(frozen=True)
class WindowRequest:
    """`fleet`: all nodes; `names`: those that compute. `strategy`: that a person names; None: as the run has it. `skip`: checks that do not count."""

    fleet: Fleet
    paths: RunPaths
    cluster_file: Path
    names: Sequence[str]
    strategy: str | None
    skip: Collection[str]
    say: Say


def run_window(
    request: WindowRequest, record: StepRecord, part: Window, points: Sequence[ResumePoint]
) -> tuple[StepRecord, WindowCompared, WindowMachines]:
    """Compute the window again. `points`: its two checkpoints, as far as it has them. Raises HomelabError where it cannot be computed."""
    paths, fleet, say = request.paths, request.fleet, request.say
    described = run_folder.description_of(paths)
    recipe = as_begun(described.recipe, run_folder.plan_of(paths), request.strategy)
    items = inputs.of_run(paths, described.run_json)
    team = fleet.only(list(request.names))
    runs_dir = paths.root.parent
    leave_folder.refuse(team, runs_dir, request.names, f"verify {paths.name}")
    with ExitStack() as unused:

        def name(evidence: Evidence) -> str:
            answers, _ = fleet.ask("runs", names=list(evidence.facts))
            others = {entry["name"] for answer in answers.values() for entry in answer["runs"]}
            taken = store.take_name(
                runs_dir, f"verify-{part.begin}-{part.end}", time.time(), others | {one.name for one in store.runs_in(runs_dir)}
            )
            unused.callback(store.give_back, runs_dir, taken)
            supervisor_record.record_holder(RunPaths(runs_dir / taken), supervisor_record.LAUNCHING, wants_supervisor=False)
            return taken

        found = preflight.look(team, recipe, items, skip=request.skip, test_collective="when-changed", run_name=name, say=say)
        resume_guards.refuse_other_data(described.run_json, found.evidence, items)
        resume_guards.refuse_other_model(described.run_json, found.evidence)
        source = paths.code / str(described.run_json.get("recipe_file", "recipe.toml"))
        prepared = Prepared(
            recipe, source, planner.pinned(items, found.evidence), found.evidence, found.findings, request.skip, found.plan, found.refused,
            recipe_text=source.read_text(encoding="utf-8") if source.is_file() else "",
        )  # fmt: skip
        prepare.refuse_on_failure(prepared)
        assert found.plan is not None
        plan = found.plan.model_copy(update={"resume_step": part.begin, "resume_digest": record.kept.get(part.begin, "")})
        for point in points:
            checkpoint_transfer.bring(fleet, paths, point, [node.name for node in plan.nodes], say, to_all=False)
        run_json = _described(described.run_json, plan, paths, record, part)
        started = _start(request, team, Prepared(**{**vars(prepared), "plan": plan, "described": run_json}), runs_dir)
    _wait(team, started, say, part)
    return _left(team, started, plan)


def _described(of_run: Any, plan: Plan, checked: RunPaths, record: StepRecord, part: Window) -> dict[str, Any]:
    """run.json of the run that is checked, word for word but for its name, with the window. The moment stays: chat templates are told it."""
    passes = {str(step): line.passes for step, line in record.steps.items() if part.begin < step <= part.end and line.passes}
    kept = {str(step): record.kept[step] for step in (part.begin, part.end) if step in record.kept}
    asked = {"run": checked.name, "begin": part.begin, "end": part.end, "passes": passes, "kept": kept}
    # In the list of runs it stands before the run that it checks: a command without a name means that one, also after this.
    rest = {key: value for key, value in of_run.items() if key != profile_files.REQUEST}
    return {**rest, "name": plan.run, "created_at": run_folder.created_at(checked) - 0.001, window.REQUEST: asked}


def _start(request: WindowRequest, team: Fleet, prepared: Prepared, runs_dir: Path) -> RunPaths:
    plan, say = prepared.plan, request.say
    assert plan is not None
    names = [node.name for node in plan.nodes]
    placement = SupervisorPlacement("here")

    def leave(paths: RunPaths) -> None:
        placement.leave(team, paths, request.cluster_file, names, QuietView(say))

    # This process is older than the runs before this one, which are no others' runs.
    age_s: Callable[[], float] = claims.since(elapsed.now_s())
    with (
        claims.claimed(team, plan.run, names, "launched", age_s=age_s, is_launch=True) as claim,
        placement.prepare(team, SupervisorRequest.of(plan), say),
    ):
        return start_run.start_run(team, claim, prepared, runs_dir, wants_supervisor=placement.is_wanted, say=say, announce=leave)


def _wait(fleet: Fleet, paths: RunPaths, say: Say, part: Window) -> None:
    """Raises HomelabError where it does not end well, with the reason that `homelab why` gives, or where it cannot be seen for long. Ctrl-C stops it."""
    watcher, told, seen_s = monitor.Watcher(fleet, paths), -1, time.monotonic()
    try:
        while True:
            try:
                snapshot = watcher.look()
            except HomelabError as error:
                if time.monotonic() - seen_s > _UNSEEN_S:
                    raise HomelabError(
                        f"steps {part} are computed again, and nothing of it was seen for {_UNSEEN_S / 60:.0f} minutes: {error.message}", where=paths.name,
                        hint=homelab("status", paths.name),
                    ) from error  # fmt: skip
                say(f"{paths.name}: {error.message}")
                time.sleep(_POLL_S)
                continue
            seen_s = time.monotonic()
            if snapshot.is_over:
                break
            if snapshot.step != told:
                say(f"{paths.name}: step {max(snapshot.step, part.begin)}, to {part.end}")
                told = snapshot.step
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        stop.stop(fleet, paths, lambda text: None)
        raise
    if snapshot.state != "done":
        stop.stop(fleet, paths, lambda text: None)
        reason = snapshot.diagnosis.title if snapshot.diagnosis else f"the run ended in the state {snapshot.state}"
        raise HomelabError(f"steps {part} could not be computed again: {reason}", where=paths.name, hint=homelab("why", paths.name))


def _left(fleet: Fleet, paths: RunPaths, planned: Plan) -> tuple[StepRecord, WindowCompared, WindowMachines]:
    """What the window has left on its head node."""
    plan = run_folder.plan_of(paths)
    machines = WindowMachines(
        run=paths.name, nodes=tuple(node.name for node in plan.nodes), strategy=plan.strategy, precision=plan.precision
    )
    text = record_source.whole_file(fleet, paths.name, plan.head, window.FOLDER, chain.RECORD, _MOST_RECORD_BYTES)
    content = record_source.whole_file(fleet, paths.name, plan.head, window.FOLDER, window.COMPARED, _MOST_COMPARED_BYTES)
    try:
        return StepRecord(text), WindowCompared.model_validate(json.loads(content or "{}")), machines
    except ValueError as error:
        raise HomelabError(
            "what the window says of its weights cannot be read", where=f"node {plan.head}: {paths.name}", hint=homelab("logs", paths.name)
        ) from error
