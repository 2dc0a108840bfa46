"""`homelab setup`: the same worker environment on every node."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from homelab.controller.base.errors import HomelabError
    from homelab.controller.config.recipe import Recipe
    from homelab.controller.features.setup.send_model import ModelDone
    from homelab.controller.features.setup.setup_nodes import NodeDone
    from homelab.controller.features.setup.wanted import WantedPackages

RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="Install the packages of this recipe, and send its base model and hub data to the nodes that lack them.",
        show_default=False,
        autocompletion=completion.recipes,
    ),
]
NodesArgument = Annotated[
    list[str] | None, typer.Argument(help="Nodes, by name. Default: all.", show_default=False, autocompletion=completion.nodes)
]


def command(
    nodes: NodesArgument = None,
    check: Annotated[bool, typer.Option("--check", help="Only show the differences. Exit code 1 if there are any.")] = False,
    requirements: Annotated[
        Path | None,
        typer.Option(
            "--requirements", metavar="FILE", help="Install these packages instead of the worker's (lines as for pip).", show_default=False
        ),
    ] = None,
    recipe: RecipeOption = None,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Install the newest versions of the packages instead of those of the first setup.")
    ] = False,
    send: Annotated[
        bool, typer.Option("--send", help="Download everything here once and send it, also to nodes that can reach the package index.")
    ] = False,
    between: Annotated[
        bool,
        typer.Option(
            "--between-nodes",
            help="Send each file to one node only; the others copy it from there (the default if this machine is on Wi-Fi).",
        ),
    ] = False,
    unsloth: Annotated[
        bool, typer.Option("--unsloth", help="Make the environment for Unsloth (`unsloth_python`), as for a recipe that uses it.")
    ] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Install the packages of the training on every node, for `python` of cluster.toml. It needs no root. A node without internet gets everything from this machine."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.config.interpreter import uses_unsloth, with_unsloth
    from homelab.controller.features.setup import hub_data, model_source, relay, send_model, setup_nodes, wanted
    from homelab.controller.features.setup.setup_plan import SetupOptions
    from homelab.controller.remote.fanout import Fleet

    training = _training_of(recipe) if recipe else None
    unsloth = unsloth or uses_unsloth(training)
    if unsloth and requirements:
        raise InputError(
            "Unsloth's packages are a list of their own",
            where="--requirements",
            hint=f"leave {'--recipe' if recipe else '--unsloth'} or --requirements out",
        )
    whole = common.load_cluster(cluster)
    if unsloth:
        whole = with_unsloth(whole)
    names = [node.name for node in common.load_cluster(cluster, ",".join(nodes or [])).nodes]
    brought: list[dict[str, ModelDone]] = []
    is_far = not check and relay.is_on_wifi(next((node.host for node in whole.nodes if node.host != "local"), ""))
    how = SetupOptions(check, upgrade, fetches_here=send, between_nodes=between or is_far)
    with Fleet(whole) as fleet, common.progress(as_json) as say:
        what = wanted.of_file(requirements) if requirements else wanted.of_fleet(fleet, say, unsloth=unsloth)
        done, errors = setup_nodes.run(fleet, names, what, how, say)
        for source in (
            [model_source.of_recipe(training.model, say), *hub_data.of_recipe(training, say)] if training and training.model else []
        ):
            entries, failed = send_model.run(fleet, done, source, how, say)
            brought.append(entries)
            errors |= failed
    differs = any(not entry.is_whole for entry in done.values()) or any(entry.missing for entries in brought for entry in entries.values())
    if as_json:
        return _print_json(what, done, brought, errors, differs=check and differs)
    if what.torch:
        terminal.echo(f"torch: {what.torch.requirement}: {what.torch.because}")
    for name, entry in done.items():
        verb = "done: " if entry.changed else ""
        terminal.echo(f"{name}: Python {entry.python}, {entry.packages} packages: {verb}{entry.difference}")
        for entries in brought:
            if name in entries:
                terminal.echo(f"{name}: {entries[name].text}")
    common.raise_first(errors.values())
    if check:
        with_recipe = f" --recipe {shlex.quote(str(recipe))}" if recipe else " --unsloth" if unsloth else ""
        terminal.echo(f"Next: homelab setup{with_recipe}{common.same_options(cluster)}" if differs else "Nothing to do.")
        return int(differs)
    of_recipe = f" {shlex.quote(str(recipe))}" if recipe else ""
    terminal.echo(
        ("" if differs else "Nothing was changed. ")
        + f"Next: homelab preflight{of_recipe}{common.same_options(cluster, nodes=','.join(nodes or []))}"
    )
    return 0


def _print_json(
    what: WantedPackages, done: dict[str, NodeDone], brought: list[dict[str, ModelDone]], errors: dict[str, HomelabError], *, differs: bool
) -> int:
    torch = what.torch and {"requirement": what.torch.requirement, "index": what.torch.index, "because": what.torch.because}
    common.print_json({
        "torch": torch, "nodes": {name: entry.model_dump() for name, entry in done.items()},
        "models": {name: entry.model_dump() for entries in brought[:1] for name, entry in entries.items()},
        "data": {name: [entries[name].model_dump() for entries in brought[1:] if name in entries] for name in done},
        "errors": {name: error.as_dict() for name, error in errors.items()},
    })  # fmt: skip
    return next(iter(errors.values())).exit_code if errors else int(differs)


def _training_of(path: Path) -> Recipe:
    from homelab.controller.base.errors import InputError
    from homelab.controller.config.load import load_recipe

    recipe = load_recipe(path)
    if recipe.model is None:
        raise InputError("this recipe has no [model]: a [script] brings its own", where=str(path), hint="leave --recipe out")
    return recipe
