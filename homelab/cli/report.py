"""`homelab report`: a run as one HTML file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, terminal


def command(
    run: common.RunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write. Default: report.html in the run's folder.", show_default=False
        ),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Write one HTML file about a run: curves, attempts, faults, shares, plan and result, energy, answers. It opens in any browser, without a server."""
    from homelab.controller.base.units import decimal_size
    from homelab.controller.features.report import page, report_builder, report_sources, sections
    from homelab.controller.run import store

    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        file = common.checked_output(output or paths.root / "report.html")
        say("reading what is known of the run")
        report = report_builder.build(report_sources.gather(fleet, paths, fleet.cluster))
        html = page.render(report)
        store.write_text(file, html)
    if as_json:
        common.print_json(
            {
                "run": paths.name,
                "answer": sections.answer(report),
                "file": str(file),
                "bytes": len(html.encode()),
                "missing": list(report.missing),
            }
        )
        return 0
    terminal.echo(sections.answer(report))
    for text in report.missing:
        terminal.echo(f"note: {text}", err=True)
    terminal.echo(f"wrote {file}, {decimal_size(len(html.encode()))}")
    terminal.echo(f"Next: xdg-open {shlex.quote(str(file))} (or open it in any browser)")
    return 0
