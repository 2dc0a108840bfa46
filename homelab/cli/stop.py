"""`homelab stop`: end a run on every node, and verify that nothing of it is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, terminal

if TYPE_CHECKING:
    from homelab.controller.config.cluster import Cluster


def command(
    run: common.RunArgument = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="End processes that finished runs have left on any node.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Stop a run. Its checkpoints stay: `homelab recover` continues from the newest."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.features.stop import stop

    if orphans:
        if run is not None:
            raise InputError(
                "--orphans is for all runs, but one is named", where=f"homelab stop {run} --orphans", hint="leave one of them out"
            )
        return _orphans(common.load_cluster(cluster), runs_dir, common.same_options(cluster, runs_dir), as_json)
    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        outcome = stop.stop(fleet, paths, say)
    if as_json:
        common.print_json(outcome.as_dict())
    else:
        next_words = (
            "The run was done already: homelab status" if outcome.was_done else "To continue from its newest checkpoint: homelab recover"
        )
        options = common.same_options(cluster, runs_dir)
        for line in (*([f"{paths.name}:"] if run is None else []), *outcome.lines(options), f"{next_words} {paths.name}{options}"):
            terminal.echo(line)
    return outcome.exit_code


def _orphans(loaded: Cluster, runs_dir: Path, options: str, as_json: bool) -> int:
    from homelab.controller.base.errors import EXIT_DONE, EXIT_UNREACHABLE
    from homelab.controller.features.stop import stop
    from homelab.controller.remote.fanout import Fleet

    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        ended, kept, unreachable, repaired = stop.end_orphans(fleet, runs_dir, say)
    if as_json:
        silent = {name: error.as_dict() for name, error in unreachable.items()}
        common.print_json({"ended": [outcome.as_dict() for outcome in ended], "kept": kept, "unreachable": silent, "mended": repaired})
    else:
        for outcome in ended:
            for line in (f"{outcome.run} was over:", *outcome.lines(options)):
                terminal.echo(line)
        for line in repaired:
            terminal.echo(line)
        terminal.echo(
            f"{'nothing else is' if ended else 'nothing is'} left of finished runs" + (f"; left alone: {', '.join(kept)}" if kept else "")
        )
        for name, error in unreachable.items():
            terminal.echo(f"{name} could not be asked: {error.message}")
        terminal.echo(f"Next: homelab runs{options}")
    worst = max((outcome.exit_code for outcome in ended), default=EXIT_DONE)
    return worst or (EXIT_UNREACHABLE if unreachable else EXIT_DONE)
