"""Start the next attempt of a run: on the nodes that are well, after a new plan, from the checkpoint that was found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from homelab.controller.attempt import inputs, planner, preconditions, start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import BusyError, HomelabError, StoppedError, SupersededError, TakenError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import gather
from homelab.controller.features.recover import checkpoint_transfer, resume_guards, strategy_change
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.halt import UNNAMED, Halted
from homelab.controller.planning.types import Plan, RankPlan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import adoption, event_log, run_folder, signals, store
from homelab.controller.run.claims import ClaimedRun
from homelab.controller.run.events import Event, event, resumed
from homelab.controller.run.fingerprint import as_begun
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.network_messages import FreePortRequest


@dataclass(frozen=True)
class NextAttempt:
    """What is asked of the next attempt.

    `nodes`: that may take part; `why_not`: why others, which answer, may not. `skip`: checks that do not count. `halvings`: node -> how
    often its micro-batch is halved. `strategy`: that a person names in place of the one of before.
    """

    nodes: Collection[str]
    skip: Collection[str]
    why_not: str = UNNAMED
    halvings: Mapping[str, int] = field(default_factory=dict)
    strategy: str | None = None


def resume(
    run: ClaimedRun,
    examination: Examination,
    halted: Halted,
    next_attempt: NextAttempt,
    *,
    announce: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Choose the nodes that are well, plan anew, start the next attempt on them.

    `announce` tells the person; no Ctrl-C comes between the start and it.
    Raises HomelabError when too few are well, or when data or model are not what the run began with: then the run is as it was.
    Nothing is left running by a failure of the start itself, or by Ctrl-C.
    """
    paths, last = run.paths, run_folder.plan_of(run.paths)
    adoption.refuse_unasked(paths)
    described = run_folder.description_of(paths)
    recipe = as_begun(described.recipe, last, next_attempt.strategy)
    items = inputs.of_run(paths, described.run_json)
    names = [name for name in halted.names if name in next_attempt.nodes]
    port = _fresh_port(run.fleet, names, recipe.parallel.port, last.master_port)
    evidence = gather.evidence(run.fleet.only(names), recipe=recipe, material=items, port=port, say=run.say, measure_wire=False)
    well, absent = _team(run, described, recipe, evidence, items, halted, next_attempt)
    # The number of an attempt that did not come to its start is used, too.
    attempt = run.claim.known(examination.attempt, *run_folder.attempts(paths)) + 1
    plan = planner.planned(
        planner.inputs_from(
            well,
            recipe,
            items,
            paths.name,
            attempt=attempt,
            port=port,
            resume_step=halted.resume_point.step,
            moment=run_folder.moment_of(described.run_json),
            last_layers=run_folder.last_layers(paths),
        )
    )
    plan = adjusted(plan, last, halted, absent, next_attempt.halvings)
    in_plan = [node.name for node in plan.nodes]
    if plan.resume_step:
        checkpoint_transfer.bring(run.fleet, paths, halted.resume_point, in_plan, run.say, to_all=recipe.script is not None)
    notes = start.ship_material(run.fleet, in_plan, items, run.say)
    plan = plan.model_copy(update={"warnings": (*plan.warnings, *notes), "strategy_by_hand": last.strategy_by_hand})
    with signals.held():
        start.write_attempt_files(paths, run.fleet, plan)  # with the name of before: later attempts keep the new one if this one starts
        plan = strategy_change.named(plan, next_attempt.strategy)
        store.set_state(paths, "starting", attempt)
        with _failure_written_down(paths, attempt):
            start.start(run.fleet, run.claim, plan, recipe, dict(described.run_json), items, run.say)
        store.set_state(paths, "running", attempt)
        strategy_change.keep(paths, last, plan, next_attempt.strategy)
        _write_events(paths, plan, examination, {node.name for node in last.nodes}, absent, is_program=recipe.script is not None)
        announce(plan)
    return plan


def _team(
    run: ClaimedRun,
    described: run_folder.Description,
    recipe: Recipe,
    evidence: Evidence,
    items: list[RecipeInput],
    halted: Halted,
    next_attempt: NextAttempt,
) -> tuple[Evidence, dict[str, str]]:
    """What was seen of the nodes that are well; node -> why another one takes no part.

    Raises HomelabError when too few nodes are well, OtherTrainingError when data or model are not what the run began with.
    """
    paths = run.paths
    findings = registry.judge_all(evidence, skip=next_attempt.skip)
    ill = {finding.node: finding for finding in findings if finding.keeps_out and finding.node}
    well = tuple(name for name in evidence.facts if name not in ill)
    if not well:
        first = next(iter(ill.values()), None)
        is_busy = ill and all(finding.is_busy for finding in ill.values())  # nothing is wrong: another program has the cards
        raise (BusyError if is_busy else HomelabError)(
            f"no node is healthy enough to continue{': ' + first.message if first else ''}",
            where=f"{paths.name}: {', '.join(ill) or ', '.join(name for name in halted.names if name in next_attempt.nodes)}",
            hint=first.hint if first else homelab("preflight"),
        )
    not_wanted = {node.name: next_attempt.why_not for node in run.fleet.cluster.nodes if node.name not in next_attempt.nodes}
    absent = {name: ill[name].message for name in ill} | not_wanted | halted.unreachable
    preconditions.refuse_too_few(paths, recipe, well, absent)
    resume_guards.refuse_other_data(described.run_json, evidence, items)
    only_well = replace(evidence, cluster=evidence.cluster.only(well), facts={name: evidence.facts[name] for name in well})
    resume_guards.refuse_other_model(described.run_json, only_well)
    return only_well, absent


def adjusted(plan: Plan, last: Plan, halted: Halted, absent: Mapping[str, str], halvings: Mapping[str, int]) -> Plan:
    """The plan with smaller micro-batches where memory ran out, and with the reasons of the nodes that were left out. Pure."""
    before = {node.name for node in last.nodes}
    return plan.model_copy(update={
        "ranks": tuple(_lowered(rank, halvings.get(rank.node, 0)) for rank in plan.ranks),
        "resume_digest": halted.resume_point.digest,
        "left_out": (*plan.left_out, *sorted(set(absent) & before)),
        "left_out_because": {name: plain_lines(why) for name, why in sorted(absent.items())},
        "warnings": (*plan.warnings, *halted.resume_point.notes, *(f"{name} is left out: {why}" for name, why in absent.items() if name in before)),
    })  # fmt: skip


def _lowered(rank: RankPlan, halvings: int) -> RankPlan:
    """Fewer rows at a time, more passes: the same gradient in less memory."""
    if not halvings:
        return rank
    cap = None if rank.token_cap is None else max(1, rank.token_cap >> halvings)
    return rank.model_copy(update={"micro_batch": max(1, rank.micro_batch >> halvings), "token_cap": cap})


@contextmanager
def _failure_written_down(paths: RunPaths, attempt: int) -> Iterator[None]:
    try:
        yield
    except StoppedError:
        store.set_state(paths, "stopped", attempt, intent="stopped")
        event_log.append(paths, event("attempt-stopped", attempt))
        raise
    except (TakenError, SupersededError):
        shutil.rmtree(paths.attempt(attempt), ignore_errors=True)  # another command has started the attempt of this number
        event_log.append(paths, event("attempt-superseded", attempt))
        raise
    except BaseException:
        store.set_state(paths, "failed", attempt)
        event_log.append(paths, event("attempt-not-started", attempt))
        raise


def _write_events(
    paths: RunPaths, plan: Plan, examination: Examination, before: Collection[str], absent: Mapping[str, str], *, is_program: bool
) -> None:
    because = examination.diagnosis.title if examination.diagnosis else examination.because
    nodes = [node.name for node in plan.nodes]
    details: dict[str, Any] = {"because": because, "nodes": nodes, "left_out": list(plan.left_out)}
    event_log.append(paths, resumed(plan.attempt, plan.resume_step, is_program=is_program, **details))
    for left_out in left_out_events(plan.attempt, before, absent):
        event_log.append(paths, left_out)


def left_out_events(attempt: int, before: Collection[str], absent: Mapping[str, str]) -> list[Event]:
    """An event for each node of the attempt before that is not in this one, with the reason: behind other details a narrow screen cuts it."""
    return [event("left-out", attempt, node=name, why=plain_lines(why)) for name, why in sorted(absent.items()) if name in before]


def _fresh_port(fleet: Fleet, names: Sequence[str], first: int, last: int) -> int:
    """A rendezvous port that is free on the first node that answers, and not the last attempt's."""
    for name in names:
        try:
            return int(fleet.agent(name).ask("free-port", FreePortRequest(low=max(first, last) + 1))["port"])
        except HomelabError:
            continue
    return last + 1 if last < 65535 else last - 1
