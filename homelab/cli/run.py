"""`homelab run -- python train.py ...`: any Python program on the cluster, from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common


def command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="python train.py ..., accelerate launch train.py ..., trl sft ..., ...", show_default=False
        ),
    ],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    skip: common.SkipOption = [],  # noqa: B006
    wait: common.WaitOption = False,
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be executed on each node; start nothing.")] = False,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Start a Python program on all nodes under torchrun, with this folder (without the files of .gitignore). plan, status, logs and stop work as for a recipe."""
    from homelab.cli import launch
    from homelab.controller.checks import registry
    from homelab.controller.config import program_command
    from homelab.controller.features.launch import project_copy
    from homelab.controller.features.launch.launch_run import LaunchRequest

    program = program_command.parsed(words)
    skipped = registry.skipped(only=[], skip=skip)
    where = common.supervise_where(supervise, no_supervise)
    typed = program_command.TypedCommand(tuple(words), str(Path.cwd()))
    with project_copy.recipe_of(program, Path.cwd()) as recipe:
        request = LaunchRequest(recipe, cluster, runs_dir, skipped, where, is_dry_run=dry_run, typed=typed)
        return launch.launched(request, nodes, wait=wait, as_json=as_json)
