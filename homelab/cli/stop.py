"""`homelab stop`: end a run on every node, and verify that nothing of it is left."""

from __future__ import annotations

from homelab.cli import common


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Stop a run. Its checkpoints stay: `homelab recover` goes on from the newest."""
    from rich.console import Console

    from homelab.control import find, stop
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        paths = find.run(fleet, runs_dir, run, say)
        outcome = stop.stop(fleet, paths, say)
    if as_json:
        common.print_json(outcome.as_dict())
    else:
        console = Console()
        for line in outcome.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"Go on from its newest checkpoint, where it has one: homelab recover {paths.name}{common.same_options(cluster, runs_dir)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return outcome.exit_code
