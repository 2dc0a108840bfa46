"""`homelab merge`: the adapter is put into its base model, on a node, and what comes out is measured."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from homelab.cli import common, terminal

_BASES = ("original", "dequantised", "auto")


def _base(text: str) -> str:
    if text not in _BASES:
        raise typer.BadParameter(f"{text!r}; allowed: {', '.join(_BASES)}")
    return text


def command(
    run: common.RunArgument = None,
    base: Annotated[
        str,
        typer.Option(
            "--base",
            metavar="original|dequantised|auto",
            parser=_base,
            help="The weights to merge onto: those of the base model's files, or the values of a base in 4 or 8 bits. auto takes the ones nearer to the adapter's loss.",
        ),
    ] = "auto",
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Merge the adapter into its base model, on the CPU of its node. Measure the loss of the adapter and of each merge on the same rows."""
    from homelab.controller.features.results import merge

    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        done = merge.merge(fleet, paths, base, say)
    if as_json:
        common.print_json(done.model_dump())
        return 0
    width = max(map(len, done.losses), default=0)
    for name, loss in done.losses.items():
        terminal.echo(f"{name:{width}}  {'-' if loss is None else f'{loss:.4f}'}")
    terminal.echo(f"{'; '.join(done.notes)}. It is in {done.folder}/ of the run, on {done.node}, and these figures are in its model card.")
    same = common.same_options(cluster, runs_dir)
    terminal.echo(f"Next: homelab fetch --merged {shlex.quote(done.run)}{same}; or homelab gguf {shlex.quote(done.run)}{same}")
    return 0
