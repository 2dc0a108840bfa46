"""`homelab runs`: every run this controller and the reachable nodes know."""

from __future__ import annotations

import typer

from homelab.cli import common


def command(
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """List the runs, newest first."""
    import time

    from rich.console import Console

    from homelab.control.inspection import run_index
    from homelab.dashboard import run_list
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        index = run_index.all_runs(fleet, runs_dir, say)
    if as_json:
        common.print_json({"runs": [row.as_dict() for row in index.rows], "unreachable": {name: error.as_dict() for name, error in index.unreachable.items()}})
        return 0
    console = Console()
    if index.rows:
        for line in run_list.lines(index.rows, time.time(), console.width):
            console.print(line, soft_wrap=True)
    for name, error in index.unreachable.items():
        console.print(f"{name} could not be asked: {error.message}", style="yellow", markup=False, highlight=False)
    options = common.same_options(cluster, runs_dir)
    next_command = f"Next: homelab status {index.rows[0].name}{options}" if index.rows else f"No runs yet. Next: homelab launch RECIPE{options}"
    typer.echo(next_command)
    return 0
