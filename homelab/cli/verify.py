"""`homelab verify`: parts of a run are computed again, and compared with its record."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, completion, terminal


def command(
    run: common.RunArgument = None,
    steps: Annotated[
        str,
        typer.Option(
            "--steps", metavar="A..B", help="These steps, from one kept checkpoint to another. Default: the record's chain chooses."
        ),
    ] = "",
    windows: Annotated[int, typer.Option("--windows", min=1, help="How many parts between kept checkpoints are computed again.")] = 3,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            "--nodes",
            metavar="NODES",
            help="Compute on these nodes. Default: those of the run.",
            autocompletion=completion.node_list,
        ),
    ] = "",
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help="Divide the work by this strategy. Default: that of the run.",
            show_default=False,
            autocompletion=completion.strategies,
        ),
    ] = None,
    skip: common.SkipOption = [],  # noqa: B006
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page to write. Default: verify.html in the run's folder.", show_default=False
        ),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Check a run: follow the chain of its record, compute parts of it again on any nodes, compare losses and weights."""
    import time

    import homelab
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED
    from homelab.controller.checks import registry
    from homelab.controller.features.recover import strategy_change
    from homelab.controller.features.verify import verify_run, verify_table
    from homelab.controller.run import store

    strategy_change.refuse_unknown(strategy, run, "verify")
    names = [node.name for node in common.described_cluster(cluster, on).nodes] if on else []
    request = verify_run.VerifyRequest(cluster, steps, windows, names, strategy, registry.skipped(only=[], skip=skip))
    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        file = common.checked_output(output or paths.root / "verify.html")
        found = verify_run.verify(fleet, paths, request, say)
        with store.best_effort_write(file):  # what was computed for hours is told all the same
            store.write_text(file, verify_table.page(found, time.time(), time.localtime().tm_gmtoff, homelab.__version__))
    code = EXIT_DONE if found.verdict == "agrees" and file not in store.UNWRITTEN else EXIT_FAILED
    if as_json:
        common.print_json({**found.model_dump(mode="json"), "file": str(file)})
        return code
    console = CleanConsole(highlight=False)
    console.print(found.answer, style="bold", soft_wrap=not console.is_terminal)
    if found.windows:
        console.print(verify_table.table(found), soft_wrap=not console.is_terminal)
    for text in (
        *(fault.text for fault in found.faults[1:]),
        *(f"steps {one.window}: {one.because}" for one in found.windows if one.because),
    ):
        terminal.echo(text)
    for note in found.notes:
        terminal.echo(f"note: {note}")
    options = common.same_options(cluster, runs_dir)
    if code == EXIT_DONE:
        terminal.echo(f"Next: xdg-open {shlex.quote(str(file))} (or open it in any browser)")
    else:
        terminal.echo(f"Next: homelab report {found.run}{options}")
    return code
