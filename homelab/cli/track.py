"""`homelab track`: a run's metrics to TensorBoard, trackio, W&B, MLflow, Aim or SwanLab."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from homelab.cli import common, terminal

ToOption = Annotated[
    list[str],
    typer.Option(
        "--to",
        help="tensorboard, trackio, wandb, mlflow, aim or swanlab (repeatable). Default: `to` of [tracking] in the recipe.",
        show_default=False,
    ),
]


def command(
    run: common.RunArgument = None,
    to: ToOption = [],  # noqa: B006
    again: Annotated[bool, typer.Option("--again", help="Send all steps again, as a new run of the tracker.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Send what is there, and do not follow a running run.")] = False,
    keep_trying: Annotated[
        bool, typer.Option("--keep-trying", help="If a tracker is down, try again for a day after the run's end.")
    ] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Send the metrics of a run to trackers, each step once, also after recoveries. It works during the run or after it. Ctrl-C does not stop the run."""
    import os
    import sys

    from homelab.controller.base.hint import homelab, with_options
    from homelab.controller.features.track.forwarding import ForwardRequest, track
    from homelab.controller.features.track.trackers import TRACKERS
    from homelab.controller.run import run_folder

    _refuse_unknown(to)
    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        trackers = tuple(dict.fromkeys(to)) or run_folder.description_of(paths).recipe.tracking.to
        _refuse_none(trackers, paths.name)
        with open(os.devnull, encoding="utf-8") as nothing:
            sys.stdin = nothing  # a tracker that wants a key says so, and does not ask for it
            state, progress = track(fleet, paths, ForwardRequest(trackers, again, once, keep_trying), say)
    if as_json:
        common.print_json({"run": paths.name, "state": state, "trackers": {name: entry.as_dict() for name, entry in progress.items()}})
        return 1 if any(entry.problem for entry in progress.values()) else 0
    options = common.options_of(cluster, runs_dir)
    for name, entry in progress.items():
        terminal.echo(f"{name}: {entry.sent} of {entry.total} points, {entry.sent_now} of them now")
        if entry.waiting:
            terminal.echo(f"  {entry.waiting} wait for a checkpoint of their step: until then a recovery may compute them again")
        if entry.repeated:
            terminal.echo(
                f"  a recovery computed {entry.repeated} of them again after they were sent: {name} keeps the first values; --again sends all of them again"
            )
    common.raise_first(entry.problem for entry in progress.values() if entry.problem)
    look = TRACKERS[trackers[0]].look if trackers[0] in TRACKERS else with_options(homelab("tensorboard", paths.name), options)
    terminal.echo(f"Next: {look}")
    return 0


def _refuse_unknown(to: list[str]) -> None:
    from homelab.controller.base.errors import InputError, did_you_mean
    from homelab.shared.recipe.operation import Tracker

    for name in to:
        if name not in get_args(Tracker):
            raise InputError(
                f'no tracker is called "{name}".{did_you_mean(name, get_args(Tracker))}',
                where=f"--to {name}",
                hint=f"one of {', '.join(get_args(Tracker))}",
            )


def _refuse_none(trackers: tuple[str, ...], run: str) -> None:
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab

    if not trackers:
        raise InputError(
            "no tracker is named", where=f"--to, and [tracking] to in the recipe of {run}", hint=homelab("track --to tensorboard", run)
        )
