"""`homelab compare`: runs side by side, e.g. one machine against all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from pathlib import Path

    from homelab.controller.base.say import Say
    from homelab.controller.features.bench.side_by_side import Side
    from homelab.controller.remote.fanout import Fleet


def command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Two runs or more, each by its name, its beginning or its end.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ],
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps of each run's last attempt that do not count for its speed.")] = 2,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Compare speed, efficiency, cost and loss of runs, and whether they are the same training: equal steps, equal losses."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.bench import side_by_side
    from homelab.controller.remote.fanout import Fleet

    if len(runs) < 2:
        raise InputError(
            "one run alone cannot be compared", where="homelab compare", hint="name two runs or more; `homelab runs` lists them"
        )
    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        sides = [_side(fleet, runs_dir, name, warmup, say) for name in runs]
    twice = next((side.run for number, side in enumerate(sides) if side.run in [other.run for other in sides[:number]]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice", where="homelab compare", hint="name each run once; `homelab runs` lists them")
    compared = side_by_side.compare(sides)
    if as_json:
        common.print_json({"runs": [one.model_dump(mode="json") for one in compared]})
        return 0
    from homelab.cli.clean_console import CleanConsole

    console = CleanConsole()
    for line in side_by_side.sentences(compared):
        console.print(f"{line}.", soft_wrap=not console.is_terminal, highlight=False)
    for table in side_by_side.tables(compared, loaded.energy, console.width):
        console.print()
        console.print(table)
    terminal.echo(f"Next: {homelab('report', sides[0].run)}{common.same_options(cluster, runs_dir)}")
    return 0


def _side(fleet: Fleet, runs_dir: Path, name: str, warmup: int, say: Say) -> Side:
    from homelab.controller.features.bench import side_by_side
    from homelab.controller.features.report import report_sources
    from homelab.controller.run import run_lookup

    paths = run_lookup.run(fleet, runs_dir, name, say)
    say(f"reading what is known of {paths.name}")
    return side_by_side.side_of(report_sources.gather(fleet, paths, fleet.cluster), warmup)
