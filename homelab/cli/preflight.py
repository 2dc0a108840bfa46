"""`homelab preflight`: is this cluster fit to train, and if not, which command mends it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common


def command(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="Also check what this recipe needs: model, data, packages.", show_default=False),
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    only: Annotated[list[str], typer.Option("--only", help="Judge only this check (repeatable).")] = [],  # noqa: B006
    skip: common.SkipOption = [],  # noqa: B006
    as_json: common.JsonOption = False,
) -> int:
    """Check every node over SSH. Exit code 1 when a check fails, 3 when a node cannot be reached."""
    from rich.console import Console

    from homelab.checks import registry, report
    from homelab.config.load import load_recipe
    from homelab.control import gather, material
    from homelab.errors import EXIT_UNREACHABLE
    from homelab.remote.fanout import Fleet

    loaded = common.load_cluster(cluster, nodes)
    skipped = registry.skipped(only=only, skip=skip)
    wanted = load_recipe(recipe) if recipe else None
    items = material.of_recipe(wanted, recipe) if wanted and recipe else []
    port = wanted.parallel.port if wanted else 29500
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        seen = gather.evidence(fleet, recipe=wanted, material=items, port=port, say=say)
    findings = registry.judge_all(seen, skip=skipped)
    failed = report.worst(findings) == "fail"
    if as_json:
        common.print_json({"cluster": loaded.name, "ok": not failed, "findings": report.as_json(findings)})
    else:
        console = Console()
        console.print(report.table(findings, [node.name for node in loaded.nodes]), soft_wrap=True)
        options = common.same_options(cluster)
        console.print(
            f"Mend what is marked fail, then run again: homelab preflight{options}" if failed else f"Fit to train. Next: homelab plan RECIPE{options}",
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    if any(error.exit_code == EXIT_UNREACHABLE for error in seen.unreachable.values()):
        return EXIT_UNREACHABLE
    return 1 if failed else 0
