"""Before a run goes on: is it still the training that it began as? Its recipe, the checkpoint, and the base model on the nodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain
from homelab.controller.checks.evidence import Evidence
from homelab.controller.facts.node_commands import on_node
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import fingerprint, store
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.checkpoint_messages import CheckpointRequest
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.request import RunRequest

_MOST_SHOWN = 5


class OtherTrainingError(HomelabError):
    """It would be another training than the run began as: waiting does not fix that, and going on would break the law."""


def refuse_edited_recipe(fleet: Fleet, paths: RunPaths, described: Mapping[str, Any]) -> None:
    """Raises OtherTrainingError when run.json says another training than at the launch, with what was changed."""
    kept = described.get("recipe_hash")
    now = fingerprint.fingerprint(described)
    if now == kept:
        return
    originals = sorted(_on_nodes(fleet, paths), key=lambda entry: entry["recipe_hash"] != kept)
    raise _edited(paths, described, originals[0] if originals else None, f"its fingerprint is {now}; at the launch it was {kept}")


def refuse_other_checkpoint(
    fleet: Fleet, paths: RunPaths, described: Mapping[str, Any], step: int, holders: list[str]
) -> tuple[dict[str, dict[str, str]], dict[str, int]]:
    """Raises OtherTrainingError when a checkpoint was saved by another training than run.json says, with the difference.

    Returns the sha256 of its files on each node, as far as the node says them, and the bytes of all of them.
    """
    own_hash = described.get("recipe_hash")
    answers, _ = fleet.ask("manifest", CheckpointRequest(run=paths.name, step=step), names=holders)
    for node, answer in answers.items():
        saved = answer.get("recipe_hash")
        if saved == own_hash:
            continue
        # Whose is it? This run's own, before run.json was edited together with its fingerprint; or that of another run.
        original = next((entry for entry in _on_nodes(fleet, paths) if entry["recipe_hash"] == saved), None)
        if original is not None:
            raise _edited(paths, described, original, f"checkpoint {step} was saved with the fingerprint {saved}")
        folder = str(answer.get("path") or f"checkpoints/step-{step:08d}")
        aside = on_node(fleet.cluster.node(node), f"mv {shlex.quote(folder)} {shlex.quote(folder + '.other')}")
        raise OtherTrainingError(
            f"checkpoint {step} belongs to a different training (fingerprint {str(saved)[:16]}, this run has {own_hash}){_whose(paths, described, saved)}",
            where=f"node {node}: {folder}",
            hint=f"move it away, then run the command again (an older checkpoint is used): {aside}",
        )
    files = {node: answer.get("files") or {} for node, answer in answers.items()}
    return files, {node: sum(map(int, answer["sizes"].values())) for node, answer in answers.items() if answer.get("sizes")}


def refuse_other_data(described: Mapping[str, Any], evidence: Evidence, items: list[RecipeInput]) -> None:
    """Raises OtherTrainingError when a node's data file is not the one that the run began with: the samples are the law."""
    for item in items:
        if item.kind != "on-node":
            continue
        expected = described["data"][item.role]["sha256"]
        for name, facts in evidence.facts.items():
            file = facts.data.get(item.role)
            if file and file.sha256 and file.sha256 != expected:
                raise OtherTrainingError(
                    "this data file is not the one the run began with: the run would train on other samples",
                    where=f"node {name}: {file.path} (sha256 {file.sha256[:12]}, the run began with {expected[:12]})",
                    hint=Hint("put the old file back, or start a new run: {}", homelab("launch RECIPE")),
                )


def refuse_other_model(described: Mapping[str, Any], evidence: Evidence) -> None:
    """Raises OtherTrainingError when the base model of a node is not the one that the run began with."""
    record = described.get("model")
    if not isinstance(record, dict) or evidence.recipe is None or evidence.recipe.model is None:
        return  # the model was downloaded by the first attempt
    model = evidence.recipe.model
    for name, facts in evidence.facts.items():
        changed = fingerprint.model_differences(record, facts.model, is_folder=model.is_folder)
        if changed:
            folder = facts.model.path if facts.model and facts.model.path else model.name
            raise OtherTrainingError(
                f"the base model is not the one the run began with: {_listed(changed)}",
                where=f"node {name}: {folder}",
                hint=Hint(
                    "put the old model back, or leave this node out with --nodes; to train this one, start a new run: {}",
                    homelab(shipped.launch(described)),
                ),
            )


def changed_here(described: Mapping[str, Any]) -> list[Hint]:
    """A line for every shipped file that is another one on this machine than at the launch: a run goes on with what it began with."""
    notes = []
    for original, digest in shipped.originals(described):
        try:
            is_other = Path(original).is_file() and file_sha256(Path(original)) != digest
        except OSError:  # gone, or this is not the machine that it was launched from
            continue
        if is_other:
            launch = homelab(shipped.launch(described))
            notes.append(
                Hint("{} was changed since the launch: this run uses the old version; to train with the new one: {}", original, launch)
            )
    return notes


def _on_nodes(fleet: Fleet, paths: RunPaths) -> list[dict[str, Any]]:
    """run.json of the nodes whose copy was not edited."""
    answers, _ = fleet.ask("describe", RunRequest(run=paths.name))
    descriptions = [answer["run_json"] for answer in answers.values() if answer["run_json"]]
    return [entry for entry in descriptions if fingerprint.fingerprint(entry) == entry.get("recipe_hash") is not None]


def _edited(paths: RunPaths, described: Mapping[str, Any], original: Mapping[str, Any] | None, otherwise: str) -> OtherTrainingError:
    try:
        changed = fingerprint.law_differences(original, described) if original else []
    except (KeyError, TypeError, AttributeError, ValueError):
        changed = []
    if original and not changed:
        changed = [f"recipe_hash: {original['recipe_hash']} -> {described.get('recipe_hash')}"]
    file = shlex.quote(str(paths.run_json))
    back = (
        f"mv {file} {file}.edited, then run the command again: the nodes have the original" if original else "put the old values back there"
    )
    return OtherTrainingError(
        f"the recipe of this run was changed since the launch: {_listed(changed) if changed else otherwise}",
        where=str(paths.run_json),
        hint=Hint("{}; to train with the changed one, which is a new training: {}", back, homelab(shipped.launch(described))),
    )


def _whose(paths: RunPaths, described: Mapping[str, Any], saved: object) -> str:
    """Of which run it is, where this machine knows that run, and how its recipe differs."""
    for other in store.runs_in(paths.root.parent):
        entry = store.read_object(other.run_json)
        if other.name != paths.name and saved is not None and entry.get("recipe_hash") == saved:
            try:
                return f": that of the run {other.name}; from there to here: {_listed(fingerprint.law_differences(entry, described))}"
            except (KeyError, TypeError, AttributeError, ValueError):
                return f": that of the run {other.name}"
    return ""


def _listed(changed: list[str]) -> str:
    more = len(changed) - _MOST_SHOWN
    return "; ".join(map(plain, changed[:_MOST_SHOWN])) + (f"; and {more} more" if more > 0 else "")
