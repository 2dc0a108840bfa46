"""The whole of a launch: checked, planned, refused or started, and left with its supervisor. A dry run ends before the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from homelab.controller.attempt.placement import SupervisorPlacement, Where
from homelab.controller.attempt.remote_supervisor import SupervisorRequest
from homelab.controller.config import profile_request
from homelab.controller.config.profile_request import ProfiledSteps, ProfileRequest
from homelab.controller.config.program_command import TypedCommand
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.launch import prepare, start_run
from homelab.controller.features.track import forwarder_start
from homelab.controller.features.track.forwarder_start import StartView
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims, leave_folder, process_owner, store, supervisor_record
from homelab.controller.run.paths import RunPaths


@dataclass(frozen=True)
class LaunchRequest:
    """What the person asked for. `skip`: checks that do not count. `age_s`: for how many seconds it has been looking at the nodes.

    `recipe_text`: the recipe as it was when it was asked for, if its file may say something else by now. `named` hears the run's name before anything
    of it is on a node.
    """

    recipe_file: Path
    cluster_file: Path
    runs_dir: Path
    skip: Collection[str]
    supervise: Where
    is_dry_run: bool = False
    typed: TypedCommand | None = None
    profile: ProfileRequest | None = None
    age_s: Callable[[], float] = process_owner.age_s
    recipe_text: str | None = None
    named: Callable[[str], None] = lambda name: None


class LaunchView(StartView, Protocol):
    """How the person is told."""

    def checked(self, prepared: prepare.Prepared) -> prepare.Prepared:
        """Show the findings; the same with hints that fit the person's options."""
        ...

    def planned(self, plan: Plan) -> None:
        """A dry run ends with this plan."""
        ...

    def started(self, paths: RunPaths, plan: Plan, profiled: ProfiledSteps | None) -> None:
        """The run trains. `profiled`: the steps that are profiled, None for none."""
        ...


def launch_run(fleet: Fleet, recipe: Recipe, request: LaunchRequest, view: LaunchView) -> RunPaths | None:
    """Launch the recipe on all nodes of `fleet`; None after a dry run. Raises HomelabError when it is refused: then nothing was started."""
    if request.profile is not None:
        profile_request.refuse_early(request.profile, recipe, str(request.recipe_file))
    _refuse_owned(fleet, request, [node.name for node in fleet.cluster.nodes])
    with ExitStack() as unused:

        def name_beside(others: set[str]) -> str:
            taken = others | {paths.name for paths in store.runs_in(request.runs_dir)}
            if request.is_dry_run:
                return store.new_name(request.recipe_file.stem, time.time(), taken)
            name = store.take_name(request.runs_dir, request.recipe_file.stem, time.time(), taken)
            unused.callback(store.give_back, request.runs_dir, name)
            supervisor_record.record_holder(RunPaths(request.runs_dir / name), supervisor_record.LAUNCHING, wants_supervisor=False)
            request.named(name)
            return name

        with view.progress() as say:
            prepared = prepare.prepare(fleet, recipe, request.recipe_file, name_beside=name_beside, skip=request.skip, say=say)
            prepared = replace(prepared, typed=request.typed, recipe_text=request.recipe_text)
        prepared = view.checked(prepared)
        prepare.refuse_on_failure(prepared)
        plan = prepared.plan
        assert plan is not None
        if request.profile is not None:
            prepared = replace(prepared, profiled=profile_request.chosen(request.profile, _steps(prepared, plan), plan.world_size))
        placement = SupervisorPlacement(request.supervise if recipe.recovery.auto else "no")
        if request.is_dry_run:
            with view.progress() as say:
                placement.rehearse(fleet, SupervisorRequest.of(plan), say)
            view.planned(plan)
            return None
        return _start(fleet, prepared, plan, request, placement, view)


def _steps(prepared: prepare.Prepared, plan: Plan) -> int | None:
    """Optimizer steps of the run, None where they are not known."""
    train = prepared.recipe.train
    return (train.steps if train else None) or (plan.time.steps if plan.time else None)


def _refuse_owned(fleet: Fleet, request: LaunchRequest, names: list[str]) -> None:
    command = ("run", "--", *request.typed.words) if request.typed else ("launch RECIPE",)
    leave_folder.refuse(fleet, request.runs_dir, names, *command)


def _start(
    fleet: Fleet, prepared: prepare.Prepared, plan: Plan, request: LaunchRequest, placement: SupervisorPlacement, view: LaunchView
) -> RunPaths:
    names = [node.name for node in plan.nodes]
    with ExitStack() as progress:
        say = progress.enter_context(view.progress())
        say(f"run {plan.run}")

        def leave(paths: RunPaths) -> None:
            with forwarder_start.left_running(placement, fleet, paths, request.cluster_file, names, view):
                progress.close()  # on a terminal it would take what is printed now for its own
                view.started(paths, plan, prepared.profiled)

        with (
            claims.claimed(fleet, plan.run, names, "launched", age_s=request.age_s, is_launch=True) as claim,
            placement.prepare(fleet, SupervisorRequest.of(plan), say),
        ):
            _refuse_owned(fleet, request, names)  # somebody may have wanted one while it was checked, and was told that it is free
            return start_run.start_run(
                fleet, claim, prepared, request.runs_dir, wants_supervisor=placement.is_wanted, say=say, announce=leave
            )
