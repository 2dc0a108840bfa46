"""`homelab setup`: the same worker environment on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common

NodesArgument = Annotated[list[str] | None, typer.Argument(help="Nodes, by name. Default: all.", show_default=False)]


def command(
    nodes: NodesArgument = None,
    check: Annotated[bool, typer.Option("--check", help="Only show what differs; exit code 1 where something does.")] = False,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", metavar="FILE", help="Install these packages instead of the worker's (lines as for pip).", show_default=False)
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Install the worker's packages on every node, where cluster.toml's `python` says. The nodes need no internet and no root: this machine fetches everything."""
    from homelab.control.setup import setup_nodes, wanted
    from homelab.remote.fanout import Fleet

    whole = common.load_cluster(cluster)
    names = [node.name for node in common.load_cluster(cluster, ",".join(nodes or [])).nodes]
    with Fleet(whole) as fleet, common.progress(as_json) as say:
        what = wanted.of_file(requirements) if requirements else wanted.of_fleet(fleet, say)
        done, errors = setup_nodes.run(fleet, names, what, check=check, say=say)
    if as_json:
        torch = what.torch and {"requirement": what.torch.requirement, "index": what.torch.index, "because": what.torch.because}
        common.print_json({
            "torch": torch, "nodes": {name: entry.model_dump() for name, entry in done.items()},
            "errors": {name: error.as_dict() for name, error in errors.items()},
        })  # fmt: skip
        return next(iter(errors.values())).exit_code if errors else int(check and not all(entry.is_whole for entry in done.values()))
    if what.torch:
        typer.echo(f"torch: {what.torch.requirement}: {what.torch.because}")
    for name, entry in done.items():
        verb = "done: " if entry.changed else ""
        typer.echo(f"{name}: Python {entry.python}, {entry.packages} packages: {verb}{entry.difference}")
    common.raise_first(errors.values())
    differs = any(not entry.is_whole for entry in done.values())
    if check:
        typer.echo(f"Next: homelab setup{common.same_options(cluster)}" if differs else "Nothing to do.")
        return int(differs)
    typer.echo(("" if differs else "Nothing was changed. ") + f"Next: homelab preflight{common.same_options(cluster)}")
    return 0
