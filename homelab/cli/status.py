"""`homelab status`: the live dashboard of a run; `--once` and `--json` for one look."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    once: Annotated[bool, typer.Option("--once", help="Print the dashboard once and end.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the run ends, also without a terminal.")] = False,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Show nodes, ranks, loss, progress, events and logs of a run. The key h shows the keys; q and Ctrl-C do not stop the run. Exit code 1 if it failed, 3 if it is lost."""
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNREACHABLE, InputError
    from homelab.controller.dashboard import live, view
    from homelab.controller.features.status import monitor
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup

    if once and wait:
        raise InputError(
            "--once is one look, and --wait stays until the end", where="homelab status --wait --once", hint="leave one of them out"
        )
    loaded = common.load_cluster(cluster)
    options = common.options_of(cluster, runs_dir)
    console = CleanConsole()
    is_live = not as_json and not once and (live.can_draw(console) or wait)
    with Fleet(loaded) as fleet:
        with common.progress(as_json) as say:
            paths = (run_lookup.awaited if is_live else run_lookup.run)(fleet, runs_dir, run, say)
            snapshot = monitor.Watcher(fleet, paths).look().with_options(options)
        if as_json:
            common.print_json(snapshot.model_dump(mode="json"))
        elif not is_live:
            console.print(view.render(snapshot, console.width, None, is_ascii=live.is_ascii(console)))
        else:
            return monitor.until_end(fleet, paths, console=console, options=options)
    return {"failed": EXIT_FAILED, "lost": EXIT_UNREACHABLE}.get(snapshot.state, EXIT_DONE)
