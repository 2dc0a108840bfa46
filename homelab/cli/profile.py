"""`homelab profile`: where the time and the memory of the profiled steps went."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from homelab.cli import common, terminal

if TYPE_CHECKING:
    from homelab.controller.features.profile.fetch_profiles import Profiles

_VIEWER = "https://ui.perfetto.dev"


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Fetch the profile of `homelab launch --profile`: the slowest operators, network traffic, memory over time, and traces for Perfetto."""
    from homelab.controller.features.profile import fetch_profiles

    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        found = fetch_profiles.bring(fleet, paths, say)
    if as_json:
        common.print_json({"run": paths.name, **_document(found)})
        return 0
    _print(found)
    for text in found.missing:
        terminal.echo(f"note: {text}", err=True)
    terminal.echo(f'Next: open {_VIEWER} in a browser, "Open trace file": {shlex.quote(str(found.traces[0]))}')
    return 0


def _document(found: Profiles) -> dict[str, object]:
    from homelab.controller.features.profile import over_ranks

    return {
        "ranks": [one.model_dump(mode="json") for one in found.ranks],
        "operators": [row.model_dump(mode="json") for row in over_ranks.dearest(found.ranks)],
        "exchanges": [row.model_dump(mode="json") for row in over_ranks.exchanges(found.ranks)],
        "memory": [row.model_dump(mode="json") for row in over_ranks.memory(found.ranks, found.predicted)],
        "slowdown": over_ranks.slowdown(found.ranks),
        "traces": [str(path) for path in found.traces],
        "missing": list(found.missing),
    }


def _print(found: Profiles) -> None:
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.features.profile import over_ranks, profile_tables

    console = CleanConsole()
    ranks = found.ranks
    steps = f"steps {ranks[0].steps[0]} to {ranks[0].steps[-1]}" if len(ranks[0].steps) > 1 else f"step {ranks[0].steps[0]}"
    times = over_ranks.slowdown(ranks)
    slower = f", each {times:.2f} times as long as a step before them" if times is not None else ""
    console.print(f"{steps} on rank {', '.join(str(one.rank) for one in ranks)}, {ranks[0].strategy}{slower}\n")
    console.print(profile_tables.phases(ranks), "", soft_wrap=True)
    console.print(profile_tables.operators(over_ranks.dearest(ranks)), "", soft_wrap=True)
    exchanges = over_ranks.exchanges(ranks)
    if exchanges:
        console.print("the exchanges of a rank in a step", profile_tables.exchanges(exchanges), "", sep="\n", soft_wrap=True)
    rows = over_ranks.memory(ranks, found.predicted)
    fullest = max(ranks, key=lambda one: one.memory.peak_bytes or 0)
    for line in profile_tables.memory_chart(fullest, found.predicted.get(fullest.rank), console.width):
        console.print(line, soft_wrap=True)
    console.print(profile_tables.memory(rows), "", soft_wrap=True)
