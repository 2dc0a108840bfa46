"""The sequence of `homelab fetch`: who holds the result, its files with digests, the bytes that are missing, one rename."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.facts.reading import read
from homelab.controller.features.results import best_copy, make, receive
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.features.results.missing import left_bytes
from homelab.controller.features.setup.transfer_progress import TransferProgress
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import layout, result_files
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.result_messages import ResultFiles, ResultRequest, Results, SavedFiles

_LIST_TIMEOUT_S = 3 * 3600.0  # the node reads every file once, for its digest


class Fetched(DisplayValue):
    """What a fetch has done. `step`: of the checkpoint, None for what the finished run has left; `left_out`: files that the node does not send."""

    run: str
    node: str
    folder: str
    files: int
    total_bytes: int
    fetched_bytes: int
    changed: bool
    step: int | None = None
    left_out: tuple[str, ...] = ()
    is_program: bool = False
    """What a program of one's own has saved, as it is; `others`: nodes that have saved something, too."""
    others: tuple[str, ...] = ()


def results_of(fleet: Fleet, paths: RunPaths) -> tuple[Mapping[str, Results], Mapping[str, HomelabError]]:
    """What the run's nodes have. Raises InputError for a [script], HomelabError where none of its nodes is in cluster.toml."""
    if run_folder.description_of(paths).recipe.model is None:
        raise InputError(
            "this run used a [script]: only that program knows its result", where=paths.name,
            hint=Hint("{} copies the files that it has saved", homelab("fetch", paths.name)),
        )  # fmt: skip
    return _looked(fleet, paths)


def _looked(fleet: Fleet, paths: RunPaths) -> tuple[Mapping[str, Results], Mapping[str, HomelabError]]:
    known = {node.name for node in fleet.cluster.nodes}
    names = [node.name for node in run_folder.plan_of(paths).nodes if node.name in known]
    if not names:
        raise HomelabError("none of the run's nodes is in cluster.toml", where=paths.name, hint=homelab("runs"))
    answers, errors = fleet.ask("result-look", RunRequest(run=paths.name), names=names)
    return {name: read(Results, answer) for name, answer in answers.items()}, errors


def model(fleet: Fleet, paths: RunPaths, place: Path, say: Say) -> Fetched:
    """Bring the trained adapter or model: final/, else the newest complete checkpoint in the same format. Of a program of one's own: what it has saved."""
    receive.checked_place(place)
    say("searching for the node that has the model")
    if run_folder.description_of(paths).recipe.model is None:
        return _saved(fleet, paths, place, say)
    results, errors = results_of(fleet, paths)
    return bring(fleet, paths, exported(fleet, paths, best_copy.choose(paths.name, results, errors), say), place, say)


def exported(fleet: Fleet, paths: RunPaths, chosen: ModelHolder, say: Say) -> ModelHolder:
    """The chosen model in the format of final/, made where it is a checkpoint yet. A run that trains may have replaced that by a newer one: then it is the newer one."""
    if chosen.is_exported:
        return chosen
    say(f"{chosen.node}: writing checkpoint {chosen.step} in the format of a finished model")
    made = make.run_node_program(fleet.agent(chosen.node), "model_export", {"run": paths.name, "step": chosen.step}, say)
    step = made.folder.rpartition("-")[2]
    return chosen.model_copy(update={"folder": made.folder, "step": int(step) if step.isdecimal() else chosen.step, "is_exported": True})


def _saved(fleet: Fleet, paths: RunPaths, place: Path, say: Say) -> Fetched:
    """The folder saved/ of the node that has the newest checkpoint, of several the one with the most files. Raises HomelabError where nobody has saved."""
    results, errors = _looked(fleet, paths)
    holders = sorted(
        (name for name, result in results.items() if result.saved_files),
        key=lambda name: (-results[name].saved_step, -results[name].saved_files),
    )
    if not holders:
        if errors and not results:
            raise next(iter(errors.values()))
        away = f"; {listed(sorted(errors))} did not answer" if errors else ""
        raise HomelabError(
            "the program has saved nothing into $HOMELAB_CHECKPOINT_DIR", where=f"{paths.name}, on {listed(sorted(results))}{away}",
            hint=Hint("to see its output: {}; the program must save its result into that folder", homelab("logs", paths.name)),
        )  # fmt: skip
    done = bring(fleet, paths, ModelHolder(node=holders[0], folder=layout.SAVED), place, say)
    return done.model_copy(update={"is_program": True, "others": tuple(holders[1:])})


def merged(fleet: Fleet, paths: RunPaths, place: Path, say: Say) -> Fetched:
    """Bring what `homelab merge` has made. Raises HomelabError where no node has it."""
    results, errors = results_of(fleet, paths)
    newest = best_copy.choose(paths.name, results, errors)
    names = best_copy.merged(results, newest.folder)
    if not names:
        older = next((result.merged for result in results.values() if result.merged), None)
        raise HomelabError(
            f"only {older} was merged, but {newest.folder} is newer" if older else "nothing was merged yet",
            where=paths.name,
            hint=homelab("merge", paths.name),
        )
    return bring(fleet, paths, ModelHolder(node=names[0], folder=result_files.MERGED), place, say)


def bring(fleet: Fleet, paths: RunPaths, chosen: ModelHolder, place: Path, say: Say) -> Fetched:
    """Bring one folder of results from its node to `place`. What was cut off goes on at the next call; a second call changes nothing."""
    whole, agent = receive.checked_place(place), fleet.agent(chosen.node)
    request = ResultRequest(run=paths.name, folder=chosen.folder)
    say(f"{chosen.node}: reading the files for their digests")
    verb, shape = ("saved-files", SavedFiles) if chosen.folder == layout.SAVED else ("result-files", ResultFiles)
    answer = read(shape, agent.ask(verb, request, timeout_s=_LIST_TIMEOUT_S))
    done = Fetched(
        run=paths.name, node=chosen.node, folder=str(place), files=len(answer.files), total_bytes=sum(file.size for file in answer.files),
        fetched_bytes=0, changed=False, step=chosen.step, left_out=answer.left_out,
    )  # fmt: skip
    if receive.is_there(whole, answer.files):
        return done
    with receive.held(whole) as partial:
        parts = receive.look(partial, answer.files)
        progress = TransferProgress(say)
        progress.begin(chosen.node, left_bytes(parts))
        for part in parts:
            receive.one(agent, request, part, partial, lambda count: progress.add(chosen.node, count))
        receive.finish(partial, whole, answer.files, {"run": paths.name, "node": chosen.node, "from": answer.path})
    return done.model_copy(update={"changed": True, "fetched_bytes": left_bytes(parts)})
