"""Recover: what happened, the newest checkpoint that is whole, the nodes that are well, the next attempt."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from homelab.checks import registry
from homelab.config.recipe import HubData, LogPolicy
from homelab.control import copies, diagnosed, find, gather, identity, interrupts, launch, refusals, start, watch
from homelab.control.claims import Claim
from homelab.control.material import Material, sha256
from homelab.diagnose import endings
from homelab.diagnose.cause import Diagnosis
from homelab.errors import HomelabError, InputError, StoppedError, SupersededError, TakenError, UnreachableError
from homelab.plain import plain_lines
from homelab.planning import report
from homelab.planning.model import Plan, RankPlan
from homelab.remote.fanout import Fleet, on_all
from homelab.runs import store
from homelab.runs.identity import as_begun
from homelab.runs.paths import RunPaths
from homelab.runs.reply import parse_replies

Say = Callable[[str], None]
UNNAMED = "--nodes does not name it"
_READ_S, _BRING_S = 1800.0, 4 * 3600.0  # a full fine-tune's checkpoint has tens of GB; a node that falls silent meanwhile is noticed by itself
# What to do where no checkpoint is left: nothing (a person decides), begin again (a person did), or begin again because none was ever due.
Scratch = Literal["never", "always", "if-nothing-was-saved"]


@dataclass(frozen=True)
class Examination:
    """What was found before anything is started again."""

    attempt: int
    because: str  # the run's state, or what the supervisor saw
    diagnosis: Diagnosis | None
    unreachable: dict[str, str]
    step: int = 0
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # node -> last lines of all its logs
    met: tuple[tuple[str, LogPolicy], ...] = ()  # (node, what of the recipe's log_policies its logs meet)


def examine(fleet: Fleet, paths: RunPaths, say: Say) -> Examination:
    """Ask all nodes what happened. Raises InputError when there is nothing to recover: the run is going on, or is done."""
    say(f"asking what happened to {paths.name}")
    watcher = watch.Watcher(fleet, paths, "")
    seen = watcher.look()
    if seen.state == "done":
        raise InputError(
            "this run is done: there is nothing to recover",
            where=paths.name,
            hint=f"homelab chat {paths.name} --prompt '...'",
        )
    if seen.state in ("running", "starting", "shipping"):
        if not watcher.unreachable:
            raise InputError(
                f"this run is {seen.state}: there is nothing to recover",
                where=f"{paths.name}, step {seen.step}",
                hint=f"homelab status {paths.name}; or first: homelab stop {paths.name}",
            )
        refusals.refuse_moving(fleet, paths.name, watcher.replies, watcher.unreachable, say, find.plan_of(paths).step_s)
    of_no_failure = ("stopping", "stopped", "planned")
    diagnosis = seen.diagnosis or (watcher.diagnosis() if seen.state not in of_no_failure else None)
    if diagnosis is not None and seen.state not in of_no_failure:
        diagnosed.keep(paths, seen.attempt, diagnosis, watcher.unreachable)
    return Examination(seen.attempt, seen.state, diagnosis, watcher.unreachable)


def examine_failure(
    fleet: Fleet, paths: RunPaths, plan: Plan, *, silent: Mapping[str, str], silent_ranks: Collection[int], has_failed: bool, because: str
) -> Examination:
    """What happened in an attempt that is to be ended: asks the nodes that can be heard, and takes `silent` (node -> why) as it is."""
    names = [node.name for node in plan.nodes if node.name not in silent and node.name in {known.name for known in fleet.cluster.nodes}]
    answers, errors = fleet.ask("poll", {"run": paths.name, "tail_lines": 200}, names=names, timeout_s=15.0)
    # Beside the recovery: it takes a moment, and the next attempt need not wait for it.
    threading.Thread(target=watch.keep, args=(paths, answers), name="keep metrics").start()
    replies = parse_replies(answers)
    unreachable = {**silent, **{name: error.message for name, error in errors.items()}}
    of_plan = {name: why for name, why in unreachable.items() if name in {node.name for node in plan.nodes}}
    ways = {name: error.hint for name, error in errors.items() if error.hint}
    diagnosis = diagnosed.make(fleet.cluster, paths, replies, of_plan, silent_ranks=silent_ranks, ways=ways) if has_failed else None
    if diagnosis is not None and diagnosis.cause == endings.SILENT.id:  # of a silent rank only who followed it can tell more
        diagnosis = diagnosis.model_copy(update={"because": (because, *diagnosis.because)})
    ranks = {name: list(reply.run.ranks.values()) if reply.run else [] for name, reply in replies.items()}
    step = max((rank.heartbeat.step for of_node in ranks.values() for rank in of_node if rank.heartbeat), default=plan.resume_step)
    if diagnosis is not None:
        diagnosed.keep(paths, plan.attempt, diagnosis, unreachable)
    logs = {name: [line for rank in of_node for line in (*rank.log_tail.stdout, *rank.log_tail.stderr)] for name, of_node in ranks.items()}
    return Examination(plan.attempt, because, diagnosis, unreachable, step, logs)


@dataclass(frozen=True)
class Halted:
    """Nothing of the run is left on the nodes that answer. `step`: from where it can go on, 0 for the beginning; `holders` have it whole."""

    names: list[str]
    unreachable: dict[str, str]
    step: int
    holders: list[str]
    digest: str = ""  # of what the holders hold
    files: Mapping[str, str] = field(default_factory=dict)  # their sha256
    notes: tuple[str, ...] = ()  # of checkpoints that are not used, and why


def halt(
    fleet: Fleet, claim: Claim, paths: RunPaths, found: Examination, *, nodes: Collection[str], from_scratch: Scratch, say: Say, grace_s: float = 3.0
) -> Halted:
    """Stop what is left of the last attempt everywhere, and choose the newest checkpoint that is whole.

    `fleet` is the whole cluster, and `claim` that on the run: without it nothing is stopped. A node that is not among `nodes` may still run the last attempt, or hold the newest
    checkpoint. Raises UnreachableError when none of `nodes` answers, HomelabError when a process does not end, when no
    complete checkpoint is left and `from_scratch` does not allow to begin again, or when it would be another training.
    """
    described, recipe = find.recipe_of(paths)
    refusals.refuse_unnamed_shares(paths, described, [*(node.name for node in fleet.cluster.nodes), *fleet.cluster.left_out])
    refusals.refuse_too_few(paths, recipe, list(nodes), {node.name: UNNAMED for node in fleet.cluster.nodes if node.name not in nodes})
    identity.refuse_edited_recipe(fleet, paths, described)
    names = [node.name for node in fleet.cluster.nodes if node.name not in found.unreachable]
    say("stopping what is left of the last attempt")
    stopped, silent = start.stop_all(fleet, paths.name, names, claim.as_request(), grace_s=grace_s)
    unreachable = found.unreachable | {name: error.message for name, error in silent.items()}
    names = [name for name in stopped if name in nodes]
    if not names:
        raise UnreachableError(
            f"of the nodes to go on with, none answers: {', '.join(nodes)}",
            where=paths.name,
            hint="homelab preflight --only ssh",
        )
    refusals.refuse_leftovers({name: stopped[name] for name in names})
    asked = [node.name for node in fleet.cluster.nodes if node.name in stopped]  # in the order of the plan: the head is the first
    step, holders, notes = _newest_checkpoint(fleet, paths, asked, silent=unreachable, from_scratch=from_scratch, say=say)
    if not step:
        return Halted(names, unreachable, step, holders, notes=notes)
    digests = identity.refuse_other_checkpoint(fleet, paths, described, step, holders)
    chosen = copies.choose(step, {name: digests.get(name, {}) for name in holders})
    for note in chosen.notes:
        store.event(paths, note)
    return Halted(names, unreachable, step, chosen.holders, chosen.digest, chosen.files, (*notes, *chosen.notes))


def resume(
    fleet: Fleet, claim: Claim, paths: RunPaths, found: Examination, halted: Halted, *, nodes: Collection[str], skip: Collection[str], say: Say,
    lower: Mapping[str, int] = MappingProxyType({}), why_not: str = UNNAMED, announce: Callable[[Plan], None] = lambda plan: None,
) -> Plan:  # fmt: skip
    """Choose the nodes of `nodes` that are well, replan, start the next attempt on them.

    `lower`: node -> how often its micro-batch is halved. `why_not`: why nodes that answer are not among `nodes`.
    `announce` tells the person; no Ctrl-C comes between the start and it.
    Raises HomelabError when too few are well, or when data or model are not what the run began with: then the run is as it was.
    Nothing is left running by a failure of the start itself, or by Ctrl-C.
    """
    described, recipe = find.recipe_of(paths)
    recipe = as_begun(recipe, find.plan_of(paths))
    items = material_of(paths, described)
    names = [name for name in halted.names if name in nodes]
    unreachable, step = halted.unreachable, halted.step
    port = _fresh_port(fleet, names, recipe.parallel.port, find.plan_of(paths).master_port)
    seen = gather.evidence(fleet.only(names), recipe=recipe, material=items, port=port, say=say, measure_wire=False)
    findings = registry.judge_all(seen, skip=skip)
    ill = {finding.node: finding for finding in findings if finding.level == "fail" and finding.node}
    well = tuple(name for name in seen.facts if name not in ill)
    if not well:
        first = next(iter(ill.values()), None)
        raise HomelabError(
            f"no node is well enough to go on{': ' + first.message if first else ''}",
            where=f"{paths.name}: {', '.join(ill) or ', '.join(names)}",
            hint=first.hint if first else "homelab preflight",
        )
    unnamed = {node.name: why_not for node in fleet.cluster.nodes if node.name not in nodes}
    gone = {name: ill[name].message for name in ill} | unnamed | unreachable
    refusals.refuse_too_few(paths, recipe, well, gone)
    identity.refuse_other_data(described, seen, items)
    attempt = claim.known(found.attempt, *find.attempts(paths)) + 1  # one that did not come to its start has used its number, too
    only_well = replace(seen, cluster=seen.cluster.only(well), facts={name: seen.facts[name] for name in well})
    identity.refuse_other_model(paths, described, only_well)
    plan = launch.make_plan(only_well, recipe, items, run=paths.name, attempt=attempt, port=port, resume_step=step)
    plan = plan.model_copy(update={"ranks": tuple(_lowered(rank, lower.get(rank.node, 0)) for rank in plan.ranks)})
    was = {node.name for node in find.plan_of(paths).nodes}
    plan = plan.model_copy(update={
        "resume_digest": halted.digest,
        "left_out": (*plan.left_out, *sorted(set(gone) & was)),
        "left_out_because": {name: plain_lines(why) for name, why in sorted(gone.items())},
        "warnings": (*plan.warnings, *halted.notes, *(f"{name} is left out: {why}" for name, why in gone.items() if name in was)),
    })  # fmt: skip
    if step:
        _bring_checkpoint(fleet, paths, halted, [node.name for node in plan.nodes], say)
    notes = start.ship_material(fleet, [node.name for node in plan.nodes], items, say)
    plan = plan.model_copy(update={"warnings": (*plan.warnings, *notes)})
    with interrupts.held():
        start.keep(paths, fleet, plan, report.text(plan))
        store.set_state(paths, "starting", attempt)
        try:
            start.start(fleet, claim, plan, described, items, say)
        except StoppedError:
            store.set_state(paths, "stopped", attempt, intent="stopped")
            store.event(paths, f"attempt {attempt} was not started: the run was stopped by hand")
            raise
        except (TakenError, SupersededError):
            shutil.rmtree(paths.attempt(attempt), ignore_errors=True)  # the attempt of this number is somebody else's
            store.event(paths, f"attempt {attempt} was not started from here: the run has gone on elsewhere")
            raise
        except BaseException:
            store.set_state(paths, "failed", attempt)
            store.event(paths, f"attempt {attempt} did not start")
            raise
        store.set_state(paths, "running", attempt)
        because = found.diagnosis.title if found.diagnosis else found.because
        store.event(
            paths,
            f"attempt {attempt} goes on after step {step}",
            because=because,
            nodes=[node.name for node in plan.nodes],
            left_out=list(plan.left_out),
        )
        for line in left_out_lines(attempt, was, gone):
            store.event(paths, line)
        announce(plan)
    return plan


def left_out_lines(attempt: int, was: Collection[str], gone: Mapping[str, str]) -> list[str]:
    """An event for each node of the attempt before that is not in this one, with the reason: behind other details a narrow screen cuts it."""
    return [f"{name} is left out of attempt {attempt}: {plain_lines(why)}" for name, why in sorted(gone.items()) if name in was]


def _lowered(rank: RankPlan, halvings: int) -> RankPlan:
    """Fewer rows at a time, more passes: the same gradient in less memory."""
    if not halvings:
        return rank
    cap = None if rank.token_cap is None else max(1, rank.token_cap >> halvings)
    return rank.model_copy(update={"micro_batch": max(1, rank.micro_batch >> halvings), "token_cap": cap})


def material_of(paths: RunPaths, described: dict[str, Any]) -> list[Material]:
    """What the run needs, from its own description; the file itself from where it was, or the copy in the run's folder."""
    items = []
    for role, entry in described["data"].items():
        if entry is None:
            continue
        local = None
        if entry.get("sent") == "shipped":
            candidates = [Path(entry["path"]), paths.code / (entry.get("inside") or entry["name"])]
            # The person may have edited the file since: only the content that the run began with will do.
            local = next(
                (path for path in candidates if path.is_file() and sha256(path) == entry["sha256"]), candidates[-1]
            )
        place = {"folder": entry.get("folder"), "inside": entry.get("inside")}
        hub = None
        if entry["kind"] == "hub":  # a run of an older version has no more than the id
            hub = HubData(entry["path"], entry.get("config"), entry.get("split", "train"), entry.get("revision"))
        items.append(
            Material(role, entry.get("sent", "on-node"), entry["path"], local, entry["sha256"] if local else None, **place, hub=hub)
        )
    return items


def _newest_checkpoint(
    fleet: Fleet, paths: RunPaths, names: list[str], *, silent: Mapping[str, str], from_scratch: Scratch, say: Say
) -> tuple[int, list[str], tuple[str, ...]]:
    """(step, nodes that hold it whole, why newer ones are not used). Step 0 when there is none and `from_scratch` allows it.

    Every node reads its newest ones (sha256), and sets aside what is damaged where it has a whole one left.
    """
    if from_scratch == "always":
        return 0, [], ()
    say("looking for the newest complete checkpoint")
    answers, errors = fleet.ask("checkpoints", {"run": paths.name, "set_aside": True}, names=names, timeout_s=_READ_S)
    best = max((step for answer in answers.values() for step in answer["good"]), default=0)
    for node, answer in answers.items():
        for step, why in answer["bad"].items():
            store.event(paths, f"checkpoint {step} on {node} is not used: {why}")
    notes = copies.unused(best, {node: answer["bad"] for node, answer in answers.items()})
    if best:
        return best, [name for name in names if name in answers and best in answers[name]["good"]], notes
    if from_scratch == "if-nothing-was-saved":
        return 0, [], notes
    raise refusals.no_checkpoint(paths.name, answers, dict(silent) | {name: error.message for name, error in errors.items()})


def _fresh_port(fleet: Fleet, names: list[str], first: int, last: int) -> int:
    """A rendezvous port that is free on the first node that answers, and not the last attempt's."""
    for name in names:
        try:
            return int(fleet.agent(name).ask("free-port", {"low": max(first, last) + 1})["port"])
        except HomelabError:
            continue
    return last + 1


def _bring_checkpoint(fleet: Fleet, paths: RunPaths, halted: Halted, names: list[str], say: Say) -> None:
    """See to it that a node of the plan holds the checkpoint whole: the ranks bring it to the others among themselves, over the LAN.

    Where only a node outside of the plan holds it, the first of `names` receives it by way of here; for a [script], whose program
    knows nothing of that, every node that lacks it does.
    """
    _, recipe = find.recipe_of(paths)
    step, holders = halted.step, halted.holders
    lacking = [name for name in names if name not in holders]
    targets = lacking if recipe.script is not None else lacking[: 0 if len(lacking) < len(names) else 1]
    if not targets:
        return
    say(f"bringing checkpoint {step} from {holders[0]} to {', '.join(targets)}")
    request = {"run": paths.name, "step": step, "files": dict(halted.files)}
    # In the run's folder: the one for temporary files is often in memory.
    with store.written(paths.root / ".checkpoint"), tempfile.NamedTemporaryFile(prefix=".checkpoint-", dir=paths.root) as archive:
        fleet.agent(holders[0]).fetch("send-checkpoint", request, archive, timeout_s=_BRING_S)  # type: ignore[arg-type]
        archive.flush()

        def send(name: str) -> None:
            with open(archive.name, "rb") as stream:
                fleet.agent(name).send("receive-checkpoint", request, stream, timeout_s=_BRING_S)

        _, errors = on_all(targets, send)
    for error in errors.values():
        raise error
