"""One attempt: the run's files to every node, torchrun started on all of them, or on none."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, StoppedError, SupersededError, TakenError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import Recipe
from homelab.controller.launchers.torchrun_ssh import by_hand
from homelab.controller.planning.machines import standbys
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.run import hub_token, signals, store
from homelab.controller.run.claims import Claim
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import layout
from homelab.shared.protocol.checkpoint_messages import CheckpointRequest, FileRequest
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.message import fields
from homelab.shared.protocol.run_requests import StartRequest, StopRequest, UndoRequest

_UNDO_S = 8.0
# The imports take some seconds of two cores, which a short run and the first steps of a long one do not have to spare.
_STANDBY_AFTER_S = 20.0
_READ_S = 1800.0  # a node reads a large file to its end before it says that it has it, and unpacks a checkpoint as large
# A node that falls silent is noticed by itself; several share one Wi-Fi.
_SEND_S, _SLOWEST_BYTES_PER_S = 600.0, 100_000
BY_HAND = {"by_hand": True}  # an earlier claim of the run may not start it any more


def ship_material(fleet: Fleet, names: list[str], material: list[RecipeInput], say: Say) -> list[str]:
    """Send every shipped file to the nodes that lack it, or have it with another content. Raises the first node's error.

    Returns what a person should know: on which nodes a file had been changed.
    """
    notes = []
    here, digests = threading.Lock(), dict[str, str | None]()
    for item in material:
        if item.kind != "shipped":
            continue
        assert item.local is not None
        place = item.place
        request = FileRequest(sha256=item.sha256 or "", name=item.local.name, folder=place.get("folder"), inside=place.get("inside"))
        changed: list[str] = []

        def send(name: str, item: RecipeInput = item, request: FileRequest = request, changed: list[str] = changed) -> None:
            agent = fleet.agent(name)
            answer = agent.ask("has-file", request, timeout_s=_READ_S)
            if answer["found"]:
                return
            with here:  # read once for all nodes: nothing is sent before it is known to be what the run began with
                if item.role not in digests:
                    digests[item.role] = _digest_here(item)
            if digests[item.role] != item.sha256:
                raise _not_here(name, item, layout.data_file(fields(request)) if answer["differs"] else None)
            assert item.local is not None
            with item.local.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                limit_s = _SEND_S + size / _SLOWEST_BYTES_PER_S
                agent.send("receive-file", request.replace(size=size), stream, timeout_s=limit_s)
            if answer["differs"]:
                changed.append(name)

        say(f"shipping {item.name} to {len(names)} node{'s' if len(names) > 1 else ''}")
        _, errors = fleet.on_all_until_stopped(names, send)
        _raise_first(errors)
        if changed:
            notes.append(f"{item.name} had been changed on {', '.join(sorted(changed))}: the original was sent again")
    return notes


def _digest_here(item: RecipeInput) -> str | None:
    """None where it is not here: the run was launched from another machine, or the file is gone since. A pipe would be waited for."""
    try:
        return file_sha256(item.local) if item.local is not None and item.local.is_file() else None
    except OSError:
        return None


def _not_here(name: str, item: RecipeInput, changed: str | None) -> HomelabError:
    """`changed`: the other content lies there, in the workdir of the node."""
    assert item.local is not None and item.sha256
    on_node = f"was changed on this node (below its workdir: {changed})" if changed else "is not on this node"
    at_controller = "the one here has changed since the launch" if item.local.is_file() else "not here either"
    return HomelabError(
        f"the run's file {item.name} {on_node}, and {at_controller}",
        where=f"node {name}; here: {item.local}",
        hint=f"copy it to {item.local} in its version of the launch (sha256 {item.sha256[:12]}), or continue without {name}: --nodes",
    )


def start(
    fleet: Fleet, claim: Claim, plan: Plan, recipe: Recipe, run_json: Mapping[str, Any], material: list[RecipeInput], say: Say
) -> None:
    """Start torchrun on every node of the plan; from the second attempt on our ranks without it (`homelab.node.run.rank_launcher`).

    When one refuses, what this claim has started on the others is stopped and its error is raised: never what somebody else has.
    The same holds for Ctrl-C, which counts when every node has answered: nothing is left running by a start that did not
    come to its end, and a start that is still on its way could not be stopped.
    """
    names = [node.name for node in plan.nodes]
    secrets = hub_token.to_send()
    is_own_worker = recipe.script is None

    def one(name: str) -> dict[str, Any]:
        node = plan.node(name)
        request = StartRequest(
            run=plan.run,
            attempt=plan.attempt,
            run_json={**run_json, "data": data_on_node(material, node.workdir, run_json["data"])},
            plan_json=plan.model_dump(mode="json"),
            command=node.command,
            environment=node.environment,
            secrets=secrets,
            token=claim.token,
            program=(node.command[0], "-m", "homelab.worker") if is_own_worker else (),
            direct=is_own_worker and plan.attempt > 1,
            standby_after_s=_STANDBY_AFTER_S if standbys.prepares(recipe) else None,
        )
        return fleet.agent(name).ask("start", request, timeout_s=30.0)

    if not is_own_worker and plan.resume_step:  # a start has seconds, and keeps everybody else from the run meanwhile
        _, errors = fleet.ask("unpack-checkpoint", CheckpointRequest(run=plan.run, step=plan.resume_step), names=names, timeout_s=_READ_S)
        _raise_first(errors)
    claim.take(names, strictly=True)  # a node may have been silent before
    say(f"starting torchrun on {', '.join(names)}")
    try:
        with signals.held(), signals.hurried(lambda: _undo_unseen(fleet, names, plan.run, claim)):
            _, errors = on_all(names, one)
        _raise_first(dict(sorted(errors.items(), key=lambda entry: not isinstance(entry[1], StoppedError))))
    except BaseException as error:
        with signals.held():
            _, unasked = fleet.ask(
                "undo", UndoRequest(run=plan.run, token=claim.token, grace_s=_UNDO_S), names=names, timeout_s=_UNDO_S + 20.0
            )
        if unasked:
            raise UnreachableError(
                f"the start was undone, but {', '.join(unasked)} could not be asked: processes may still run there",
                where=f"{plan.run}; the start ended with: {str(error) or type(error).__name__}",
                hint=Hint("when it answers again: {}", homelab("stop", plan.run)),
            ) from error
        raise


def _undo_unseen(fleet: Fleet, names: list[str], run: str, claim: Claim) -> None:
    """Over connections of their own: those that are there wait for an answer. A node does what it was asked, whoever waits for the answer."""
    with Fleet(fleet.cluster) as other:
        other.ask("undo", UndoRequest(run=run, token=claim.token, grace_s=_UNDO_S), names=names, timeout_s=_UNDO_S)


def data_on_node(material: list[RecipeInput], workdir: str, described: Mapping[str, Any]) -> dict[str, Any]:
    """run.json's `data` with the paths of one node."""
    data: dict[str, Any] = {"eval": None}
    for role, entry in described.items():
        item = next((item for item in material if item.role == role), None)
        if entry is not None and item is not None:
            data[role] = {**entry, "path": item.node_path(workdir)}
    return data


def stop_all(
    fleet: Fleet,
    run: str,
    names: Collection[str],
    how: Mapping[str, Any],
    grace_s: float = 8.0,
    workdirs: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, HomelabError]]:
    """End the run on these nodes: what each says, and the nodes that could not be asked. `how`: BY_HAND, or a claim's `as_request`.
    `workdirs`: where the run's folders were made, by node: it is looked for there, too.

    First every node writes down that a stop is meant: ranks whose peers were stopped first fail, and must not look like the
    cause of it.
    """
    _, errors = fleet.ask("mark-stop", StopRequest(run=run, **how), names=names)
    for error in errors.values():
        if isinstance(error, (TakenError, SupersededError)):
            raise error

    def request(node: Node) -> StopRequest:
        return StopRequest(run=run, grace_s=grace_s, made_in=workdirs.get(node.name), **how)

    return fleet.ask("stop", request, names=names, timeout_s=grace_s + 20.0)


def write_attempt_files(paths: RunPaths, fleet: Fleet, plan: Plan) -> None:
    """Write the attempt's plan and commands into the controller's run folder."""
    store.write_json(paths.plan_json(plan.attempt), plan.model_dump(mode="json"))
    from homelab.controller.planning.render import plan_table

    store.write_text(paths.plan_txt, plan_table.text(plan))
    targets = {node.name: f"{node.user + '@' if node.user else ''}{node.host}" for node in fleet.cluster.nodes}
    head = f"#!/bin/sh\n# {plan.run}, attempt {plan.attempt}: what was executed on each node. Start all of them within a few minutes.\n\n"
    if plan.resume_step:
        head += (
            f"# It continues from checkpoints/step-{plan.resume_step:08d}. Newer checkpoints have taken its place in the end ([checkpoint] keep); then either\n"
            f"# homelab recover {plan.run}, or by hand: set resume_step in attempts/{plan.attempt}/plan.json on every node to a step that they hold.\n\n"
        )
    store.write_text(paths.commands_sh, head + "\n".join(by_hand(node, targets.get(node.name, node.name)) for node in plan.nodes))


def _raise_first(errors: Mapping[str, HomelabError]) -> None:
    for error in errors.values():
        raise error
