"""`homelab bench`: a suite of strategies, nodes and variations, each cell a real run; figures, charts and a report. `homelab bench card`: one card."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

import homelab
from homelab.cli import common, terminal
from homelab.cli.bench_card import command as card

__all__ = ("app", "card", "command")

if TYPE_CHECKING:
    from collections.abc import Callable

    from homelab.controller.features.bench.page import About
    from homelab.controller.features.bench.result import Result
    from homelab.controller.features.bench.suite_run import SuiteRun


class SuiteOrCommand(typer.core.TyperGroup):
    """`homelab bench SUITE.toml` is `homelab bench suite SUITE.toml`: what is no command is a suite, or an option of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["suite", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [*super().shell_complete(ctx, incomplete), *self.commands["suite"].params[0].shell_complete(ctx, incomplete)]


app = typer.Typer(
    cls=SuiteOrCommand,
    no_args_is_help=True,
    help="Measure: `homelab bench SUITE.toml` strategies and nodes side by side, `homelab bench card` one card.",
)


def command(
    suite: Annotated[
        Path, typer.Argument(metavar="SUITE.toml", help="The suite: a recipe, strategies, sets of nodes.", show_default=False)
    ],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where results are kept. Default: bench/SUITE.", show_default=False)
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run the cells again that failed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells; start nothing.")] = False,
    as_json: common.JsonOption = False,
) -> int:
    """Measure strategies and nodes side by side, by real runs. Started again, it skips the cells that are done."""
    from homelab.controller.config.suite import load_suite
    from homelab.controller.features.bench import table
    from homelab.controller.features.bench.cell import cells_of
    from homelab.controller.features.bench.folder import BenchmarkFolder
    from homelab.controller.features.bench.suite_run import SuiteRun

    loaded, contents = load_suite(suite)
    machines = common.load_cluster(cluster)
    cells = cells_of(loaded, {node.name: max(1, len(node.gpus)) for node in machines.nodes})
    folder = BenchmarkFolder(output or Path("bench") / suite.stem)
    again = f"homelab bench {shlex.quote(str(suite))}{f' --output {shlex.quote(str(output))}' if output else ''}"
    again += common.same_options(cluster)
    if dry_run:
        if as_json:
            common.print_json(
                {
                    "cells": [{"strategy": cell.strategy, "nodes": cell.nodes, "variation": cell.variation} for cell in cells],
                    "repeats": loaded.repeats,
                }
            )
            return 0
        for cell in cells:
            terminal.echo(cell.label)
        terminal.echo(f"{len(cells)} cells, {loaded.repeats} runs each of {loaded.steps} steps\nNext: {again}")
        return 0
    run = SuiteRun(loaded, cells, contents, (suite.parent / loaded.recipe).resolve().parent, machines, cluster, folder)
    files = {
        name: path.read_text(encoding="utf-8")
        for name, path in ((suite.name, suite), (Path(loaded.recipe).name, suite.parent / loaded.recipe))
    }

    def written(result: Result | None = None) -> None:
        if result is not None and not as_json:
            terminal.echo(_line(result), err=True)
        _write(run, suite.stem, files, again)

    with folder.held():
        _go(run, written, again=retry, as_json=as_json)
        drawn = _charts(run)
    cells_now = run.summary()
    if as_json:
        common.print_json(
            {"folder": str(folder.root), "cells": [cell.model_dump(mode="json") | {"spread": cell.spread} for cell in cells_now]}
        )
    else:
        from homelab.cli.clean_console import CleanConsole

        CleanConsole().print(table.table(cells_now), soft_wrap=True)
        for line in table.reasons(cells_now):
            terminal.echo(f"- {line}")
        terminal.echo(f"wrote {folder.csv}, {folder.page}, {folder.charts}/{drawn}")
        terminal.echo(f"Next: xdg-open {shlex.quote(str(folder.page))} (or open it in any browser)")
    return 0 if all(cell.tokens_per_s is not None for cell in cells_now) else 1


def _go(run: SuiteRun, written: Callable[[Result | None], None], *, again: bool, as_json: bool) -> None:
    with common.progress(as_json) as say:
        run.begin(again=again, say=say)
        written(None)
        try:
            run.go(say, written)
        except KeyboardInterrupt:
            run.interrupted(say)
            raise


def _line(result: Result) -> str:
    figures = f"{result.measured.tokens_per_s:.0f} tokens/s" if result.measured else f"{result.state}: {result.because}"
    return f"{result.cell.label}, run {result.repeat}: {figures}"


def _write(run: SuiteRun, name: str, files: dict[str, str], again: str) -> None:
    """The CSV and the page, after every run: they are whole whenever this process ends."""
    from homelab.controller.features.bench import page, table
    from homelab.controller.run import store

    now, results = time.time(), run.folder.results()
    about: About = page.About(
        name,
        run.suite,
        files,
        [f"pip install ./homelab_trainer-{homelab.__version__}-py3-none-any.whl", again],
        now,
        time.localtime(now).tm_gmtoff,
    )
    store.write_text(run.folder.csv, table.as_csv(results))
    store.write_text(run.folder.page, page.render(about, run.summary(), results))


def _charts(run: SuiteRun) -> str:
    """SVG, and PNG where resvg is installed; the names of what was written."""
    from homelab.controller.base import package
    from homelab.controller.features.bench import page
    from homelab.controller.run import store

    drawn: Callable[..., bytes] | None = None
    try:
        from resvg_py import svg_to_bytes

        drawn = svg_to_bytes
    except ImportError:
        terminal.echo(f"note: the charts are SVG alone; for PNG: {package.install('resvg-py')}", err=True)
    run.folder.charts.mkdir(exist_ok=True)
    for curve in page.chart_curves(run.summary()):
        file = run.folder.charts / f"{curve.name.lower().replace(' ', '-')}.svg"
        svg = page.standalone(curve)
        store.write_text(file, svg)
        if drawn is not None:
            file.with_suffix(".png").write_bytes(bytes(drawn(svg_string=svg, zoom=2)))
    return "*.svg" if drawn is None else "*.{svg,png}"
