"""`homelab runs`: every run this controller and the reachable nodes know."""

from __future__ import annotations

from homelab.cli import common


def command(
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """List the runs, newest first."""
    import time

    from rich.console import Console

    from homelab.control import find
    from homelab.dashboard import listing
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        rows, unreachable = find.all_runs(fleet, runs_dir, say)
    if as_json:
        common.print_json({"runs": rows, "unreachable": {name: error.as_dict() for name, error in unreachable.items()}})
        return 0
    console = Console()
    if rows:
        for line in listing.lines(rows, time.time(), console.width):
            console.print(line, soft_wrap=True)
    for name, error in unreachable.items():
        console.print(f"{name} could not be asked: {error.message}", style="yellow", markup=False, highlight=False)
    options = common.same_options(cluster, runs_dir)
    console.print(
        f"Next: homelab status {rows[0]['name']}{options}"
        if rows
        else f"No runs yet. Next: homelab launch RECIPE{options}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0
