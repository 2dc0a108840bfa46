"""End what is left of an attempt everywhere, and find the newest checkpoint that is whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from homelab.controller.attempt import preconditions, start
from homelab.controller.base.errors import UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.base.say import Say
from homelab.controller.features.recover import replicas, resume_guards
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder
from homelab.controller.run.claims import ClaimedRun
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import checkpoint_holders
from homelab.shared.protocol.checkpoint_holders import REPLICATED, Holding
from homelab.shared.protocol.checkpoint_messages import CheckpointsRequest

UNNAMED = "--nodes does not name it"
_READ_S = 1800.0  # a full fine-tune's checkpoint has tens of GB
# What to do where no checkpoint is left: nothing (a person decides), begin again (a person did), or begin again because none was ever due.
Scratch = Literal["never", "always", "if-nothing-was-saved"]


@dataclass(frozen=True)
class Halted:
    """Nothing of the run is left on `names`, the nodes that answer and may go on."""

    names: list[str]
    unreachable: dict[str, str]
    resume_point: ResumePoint


def halt(run: ClaimedRun, examination: Examination, *, nodes: Collection[str], from_scratch: Scratch, grace_s: float = 3.0) -> Halted:
    """Stop what is left of the last attempt on all nodes of the cluster, and choose the newest checkpoint that is whole.

    A node that is not among `nodes` may still run the last attempt, or hold the newest checkpoint.
    Raises UnreachableError when none of `nodes` answers, HomelabError when a process does not end, when no complete checkpoint is left
    and `from_scratch` does not allow to begin again, or when it would be another training.
    """
    fleet, paths = run.fleet, run.paths
    described = run_folder.description_of(paths)
    in_cluster = [node.name for node in fleet.cluster.nodes]
    preconditions.refuse_unnamed_shares(paths, described.run_json, [*in_cluster, *fleet.cluster.left_out])
    preconditions.refuse_too_few(paths, described.recipe, list(nodes), {name: UNNAMED for name in in_cluster if name not in nodes})
    resume_guards.refuse_edited_recipe(fleet, paths, described.run_json)
    run.say("stopping the processes of the last attempt")
    reachable = [name for name in in_cluster if name not in examination.unreachable]
    stopped, errors = start.stop_all(fleet, paths.name, reachable, run.claim.as_request(), grace_s=grace_s)
    unreachable = examination.unreachable | {name: error.message for name, error in errors.items()}
    names = [name for name in stopped if name in nodes]
    if not names:
        raise UnreachableError(
            f"none of the remaining nodes answers: {', '.join(nodes)}", where=paths.name, hint=homelab("preflight --only ssh")
        )
    preconditions.refuse_leftovers({name: stopped[name] for name in names})
    stopped_names = [name for name in in_cluster if name in stopped]  # in the order of the plan: the head is the first
    layout = run_folder.plan_of(paths).checkpoint_layout
    checkpoint = newest_checkpoint(fleet, paths, stopped_names, silent=unreachable, from_scratch=from_scratch, say=run.say, layout=layout)
    if not checkpoint.step:
        return Halted(names, unreachable, checkpoint)
    digests, sizes = resume_guards.refuse_other_checkpoint(fleet, paths, described.run_json, checkpoint.step, checkpoint.holders)
    if checkpoint.shards:  # each node has another part: there is nothing to compare
        return Halted(names, unreachable, checkpoint)
    chosen = replicas.choose(checkpoint.step, {name: digests.get(name, {}) for name in checkpoint.holders})
    for note in chosen.notes:
        event_log.append(paths, event("note", text=note))
    return Halted(names, unreachable, replace(chosen, notes=(*checkpoint.notes, *chosen.notes), sizes=sizes))


def newest_checkpoint(
    fleet: Fleet, paths: RunPaths, names: list[str], *, silent: Mapping[str, str], from_scratch: Scratch, say: Say, layout: str = REPLICATED
) -> ResumePoint:
    """The newest that a node holds whole or, where the `layout` is sharded, that all hold together.

    Step 0 when there is none and `from_scratch` allows it, else raises HomelabError. Where that is "always", they are moved out of the way: the
    next restart would go on from them.

    Every node reads its newest ones (sha256), and sets aside what is damaged where it has a whole one left.
    """
    if from_scratch == "always":
        say("moving the checkpoints out of the way")
        _, errors = fleet.ask("checkpoints", CheckpointsRequest(run=paths.name, begin_again=True), names=names, timeout_s=_READ_S)
        for error in errors.values():
            raise error
        return ResumePoint(
            0, [], notes=tuple(f"{name} may still have checkpoints, from which a recovery with it goes on" for name in silent)
        )
    say("looking for the newest complete checkpoint")
    request = CheckpointsRequest(run=paths.name, set_aside=layout == REPLICATED, layout=layout)
    answers, errors = fleet.ask("checkpoints", request, names=names, timeout_s=_READ_S)
    found = checkpoint_holders.choose(_held({name: answers[name] for name in names if name in answers}, layout))
    newest, mute = found.step, [*silent, *errors]
    for node, answer in answers.items():
        for step, why in answer["bad"].items():
            event_log.append(paths, event("checkpoint-unused", step=step, node=node, why=why))
    notes = replicas.unused(newest, {node: answer["bad"] for node, answer in answers.items()})
    for note in (gaps := replicas.incomplete(found.incomplete, mute)):
        event_log.append(paths, event("note", text=note))
    notes = (*notes, *gaps)
    if newest:
        shards = {name: its for name, its in found.held.items() if its.of > 1}
        return ResumePoint(newest, list(found.held), notes=notes, shards=shards)
    if found.incomplete:
        raise preconditions.no_whole_checkpoint(paths.name, gaps, mute)
    if from_scratch == "if-nothing-was-saved":
        return ResumePoint(0, [], notes=notes)
    raise preconditions.no_checkpoint(paths.name, answers, dict(silent) | {name: error.message for name, error in errors.items()})


def _held(answers: Mapping[str, Mapping[str, Any]], layout: str) -> dict[int, dict[str, Holding]]:
    """Step -> node -> what it has of it, from the answers of `checkpoints`."""
    held: dict[int, dict[str, Holding]] = {}
    for name, answer in answers.items():
        for step in answer["good"]:
            its = checkpoint_holders.holding(layout, answer.get("shards", {}).get(str(step)))
            if its is not None:
                held.setdefault(step, {})[name] = its
    return held
