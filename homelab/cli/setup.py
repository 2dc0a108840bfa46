"""`homelab setup`: the same worker environment on every node."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.config.recipe import Model
    from homelab.errors import HomelabError

NodesArgument = Annotated[list[str] | None, typer.Argument(help="Nodes, by name. Default: all.", show_default=False)]


def command(
    nodes: NodesArgument = None,
    check: Annotated[bool, typer.Option("--check", help="Only show what differs; exit code 1 where something does.")] = False,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", metavar="FILE", help="Install these packages instead of the worker's (lines as for pip).", show_default=False)
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="Also send the base model of this recipe to the nodes that lack it.", show_default=False)
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Install the worker's packages on every node, where cluster.toml's `python` says. The nodes need no internet and no root: this machine fetches everything."""
    from homelab.control.setup import model_source, send_model, setup_nodes, wanted
    from homelab.remote.fanout import Fleet

    model = _model_of(recipe) if recipe else None
    whole = common.load_cluster(cluster)
    names = [node.name for node in common.load_cluster(cluster, ",".join(nodes or [])).nodes]
    models: dict[str, send_model.ModelDone] = {}
    without_model: dict[str, HomelabError] = {}
    with Fleet(whole) as fleet, common.progress(as_json) as say:
        what = wanted.of_file(requirements) if requirements else wanted.of_fleet(fleet, say)
        done, errors = setup_nodes.run(fleet, names, what, check=check, say=say)
        if model:
            models, without_model = send_model.run(fleet, done, model_source.of_recipe(model, say), check=check, say=say)
    errors |= without_model
    differs = any(not entry.is_whole for entry in done.values()) or any(entry.missing for entry in models.values())
    if as_json:
        torch = what.torch and {"requirement": what.torch.requirement, "index": what.torch.index, "because": what.torch.because}
        common.print_json({
            "torch": torch, "nodes": {name: entry.model_dump() for name, entry in done.items()},
            "models": {name: entry.model_dump() for name, entry in models.items()},
            "errors": {name: error.as_dict() for name, error in errors.items()},
        })  # fmt: skip
        return next(iter(errors.values())).exit_code if errors else int(check and differs)
    if what.torch:
        typer.echo(f"torch: {what.torch.requirement}: {what.torch.because}")
    for name, entry in done.items():
        verb = "done: " if entry.changed else ""
        typer.echo(f"{name}: Python {entry.python}, {entry.packages} packages: {verb}{entry.difference}")
        if name in models:
            typer.echo(f"{name}: {models[name].text}")
    common.raise_first(errors.values())
    if check:
        with_recipe = f" --recipe {shlex.quote(str(recipe))}" if recipe else ""
        typer.echo(f"Next: homelab setup{with_recipe}{common.same_options(cluster)}" if differs else "Nothing to do.")
        return int(differs)
    of_recipe = f" {shlex.quote(str(recipe))}" if recipe else ""
    typer.echo(("" if differs else "Nothing was changed. ") + f"Next: homelab preflight{of_recipe}{common.same_options(cluster)}")
    return 0


def _model_of(path: Path) -> Model:
    from homelab.config.load import load_recipe
    from homelab.errors import InputError

    recipe = load_recipe(path)
    if recipe.model is None:
        raise InputError("this recipe has no [model]: a [script] brings its own", where=str(path), hint="leave --recipe out")
    return recipe.model
