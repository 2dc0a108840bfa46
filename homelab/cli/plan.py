"""`homelab plan`: who does what, does it fit, and why; runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe file.", show_default=False)],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    offline: Annotated[bool, typer.Option("--offline", help="Ask no node: believe cluster.toml.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Also print the reason of each choice.")] = False,
    as_json: common.JsonOption = False,
) -> int:
    """Print nodes, ranks, shares, environment, torchrun commands and a memory estimate. Nothing is started."""
    import shlex

    from rich.console import Console

    from homelab.config.load import load_recipe
    from homelab.control import gather, launch, material
    from homelab.planning import plan as planning
    from homelab.planning import report
    from homelab.remote import ship
    from homelab.remote.fanout import Fleet

    loaded, wanted = common.load_cluster(cluster, nodes), load_recipe(recipe)
    items = [] if offline else material.of_recipe(wanted, recipe)
    if offline:
        made = planning.make(
            loaded,
            wanted,
            {},
            run=recipe.stem,
            attempt=1,
            port=wanted.parallel.port,
            resume_step=0,
            code_dir=ship.code_dir,
            script_path=None,
        )
    else:
        with Fleet(loaded) as fleet, common.progress(as_json) as say:
            seen = gather.evidence(fleet, recipe=wanted, material=items, port=wanted.parallel.port, say=say, dial=False)
            if not seen.facts:
                raise next(iter(seen.unreachable.values()))
            made = launch.make_plan(
                seen, wanted, items, run=recipe.stem, attempt=1, port=wanted.parallel.port, resume_step=0
            )
            for name, error in seen.unreachable.items():
                made = made.model_copy(
                    update={
                        "warnings": (*made.warnings, f"{name} did not answer and is not in this plan: {error.message}")
                    }
                )
    if as_json:
        common.print_json(made.model_dump(mode="json"))
        return 0
    console = Console()
    console.print(report.table(made, why=why))
    options = common.same_options(cluster)
    console.print(f"Next: homelab launch {shlex.quote(str(recipe))}{options}", soft_wrap=True, markup=False, highlight=False)
    return 0
