"""`homelab logs`: what every rank printed."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common


def command(
    run: common.RunArgument = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", min=1, help="What was printed in this attempt. Default: the newest.", show_default=False
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines of each stream.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Print the last lines of every rank's stdout and stderr, and of torchrun where it said something, in the newest attempt or in the one named."""
    from homelab.control import find, logs
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet:
        with common.progress(as_json) as say:
            paths = find.run(fleet, runs_dir, run, say)
        if as_json:
            common.print_json(logs.tails(fleet, paths, rank, lines, attempt))
        else:
            logs.print_tails(
                fleet,
                paths,
                rank,
                lines,
                follow=follow,
                attempt=attempt,
                options=common.same_options(cluster, runs_dir),
            )
    return 0
