"""The sequence of `homelab profile`: which node has which rank's profile, its files with digests, and what is in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.profile.rank_profile import RankProfile, predicted_bytes
from homelab.controller.features.results import fetch
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.features.track.metrics_source import MetricsSource
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import profile_files

_FAILED = "no profile"  # how the worker's note begins


@dataclass(frozen=True)
class Profiles:
    """The profiles that are here, in rank order. `predicted`: rank -> bytes of the plan's peak; `missing`: what is not here, and why."""

    ranks: tuple[RankProfile, ...]
    predicted: Mapping[int, int | None]
    missing: tuple[str, ...]
    traces: tuple[Path, ...]


def bring(fleet: Fleet, paths: RunPaths, say: Say) -> Profiles:
    """Bring what the nodes have of the run's profiles into its folder here, and read it. Raises HomelabError where there is none."""
    described = run_folder.description_of(paths)
    if described.recipe.script is not None:
        raise InputError(
            "this run used a [script]: only the built-in worker makes profiles", where=paths.name, hint="use torch.profiler in the script"
        )
    asked = described.run_json.get(profile_files.REQUEST)
    if not isinstance(asked, dict):
        recipe = str(described.run_json.get("recipe_file") or "RECIPE")
        raise HomelabError(
            "no step of this run was profiled",
            where=paths.name,
            hint=Hint("launch one that is: {}", homelab("launch", recipe, "--profile", "3")),
        )
    say("searching for the node that has the profiles")
    results, errors = fetch.results_of(fleet, paths)
    holders = {rank: node for node, result in sorted(results.items()) for rank in result.profiles}
    for rank, node in sorted(holders.items()):
        folder = profile_files.rank_folder(rank)
        fetch.bring(fleet, paths, ModelHolder(node=node, folder=folder), paths.root / folder, say)
    names = [path.name for path in paths.profiles.glob("rank-*")]
    ranks = sorted(number for name in names if (number := profile_files.rank_of(name)) is not None)
    wanted = [rank for rank in asked.get("ranks", ()) if isinstance(rank, int)]
    missing = _missing(fleet, paths, [rank for rank in wanted if rank not in ranks], errors)
    if not ranks:
        raise _none(paths, asked, missing, errors)
    read = tuple(_read(paths, rank) for rank in ranks)
    plans = {one.attempt: run_folder.plan_of(paths, one.attempt) for one in read}
    predicted = {one.rank: predicted_bytes(plans[one.attempt], one.rank) for one in read}
    return Profiles(read, predicted, missing, tuple(paths.root / profile_files.rank_folder(rank) / profile_files.TRACE for rank in ranks))


def _read(paths: RunPaths, rank: int) -> RankProfile:
    file = paths.root / profile_files.rank_folder(rank) / profile_files.SUMMARY
    try:
        profile = RankProfile.model_validate(store.read_json(file))
    except ValidationError as error:
        raise HomelabError(
            f"this profile cannot be read: {error.errors()[0]['msg']}",
            where=str(file),
            hint=Hint("remove it: rm -r {}; then {}", shlex.quote(str(file.parent)), homelab("profile", paths.name)),
        ) from error
    return profile.model_copy(update={"rank": rank})


def _missing(fleet: Fleet, paths: RunPaths, ranks: list[int], errors: Mapping[str, HomelabError]) -> tuple[str, ...]:
    """What is not here, and why; notes of the worker first."""
    if not ranks:
        return ()
    MetricsSource(fleet, paths).look()
    notes = [
        str(line["message"])
        for line in store.read_lines(paths.metrics_jsonl)
        if line.get("kind") == "note" and str(line.get("message")).startswith(_FAILED)
    ]
    silent = [f"{node} does not answer: {error.message}" for node, error in errors.items()]
    return (*dict.fromkeys(notes), *silent, f"there is no profile of rank {', '.join(map(str, ranks))}")


def _none(paths: RunPaths, asked: Mapping[str, object], missing: tuple[str, ...], errors: Mapping[str, HomelabError]) -> HomelabError:
    steps = f"steps {asked.get('first_step')} to {asked.get('last_step')}"
    if missing and missing[0].startswith(_FAILED):
        return HomelabError(missing[0], where=paths.name, hint=homelab("logs", paths.name))
    if errors:
        return next(iter(errors.values()))
    return HomelabError(
        f"the profile of {steps} is not made yet, or the run ended before it",
        where=paths.name,
        hint=Hint("to see its progress: {}", homelab("status", paths.name)),
    )
