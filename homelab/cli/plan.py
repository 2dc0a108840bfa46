"""`homelab plan`: who does what, does it fit, and why; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.config.cluster import Cluster
    from homelab.config.recipe import Recipe
    from homelab.facts import Facts
    from homelab.planning.model import Plan


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe file.", show_default=False)],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    offline: Annotated[bool, typer.Option("--offline", help="Ask no node: believe cluster.toml.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Also print the reason of each choice.")] = False,
    what_if: Annotated[
        list[str],
        typer.Option("--what-if", help="Compare with one more machine (+RTX3090, +2xRTX3090) or without a node (-laptop); repeatable."),
    ] = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run/--no-dry-run", help="Try the training step without weights on one node.")] = True,
    fit: Annotated[bool, typer.Option("--fit", help="Write a copy of the recipe that fits into the free memory.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where --fit writes. Default: RECIPE-fit.toml.", show_default=False)
    ] = None,
    as_json: common.JsonOption = False,
) -> int:
    """Print nodes, ranks, shares, memory, time, environment and torchrun commands. Nothing is started."""
    from rich.console import Console

    from homelab.config.interpreter import for_recipe
    from homelab.config.load import load_recipe
    from homelab.control import gather, launch, material
    from homelab.errors import InputError
    from homelab.planning import batch, report
    from homelab.planning.command import file_word
    from homelab.remote.fanout import Fleet

    if output is not None and not fit:
        raise InputError("--output says where --fit writes, and there is no --fit", where="--output", hint="add --fit")
    given, wanted = common.load_cluster(cluster, nodes), load_recipe(recipe)
    given = for_recipe(given, wanted)
    notes: list[str] = []
    if offline:
        loaded, facts, throughputs = given, {}, {}
        try:
            items = material.of_recipe(wanted, recipe)
        except InputError as error:  # only the number of rows is missed
            items = []
            notes.append(f"{error.message}: {error.where}")
    else:
        items = material.of_recipe(wanted, recipe)
        with Fleet(given) as fleet, common.progress(as_json) as say:
            seen = gather.evidence(fleet, recipe=wanted, material=items, port=wanted.parallel.port, say=say)
        if not seen.facts:
            raise next(iter(seen.unreachable.values()))
        loaded, facts, throughputs = gather.reachable(seen.cluster, seen), dict(seen.facts), seen.throughputs
        notes += [f"{name} did not answer and is not in this plan: {error.message}" for name, error in seen.unreachable.items()]

    def make(asked: Recipe, of: Cluster, known: Mapping[str, Facts]) -> Plan:
        made = batch.settle(
            asked, lambda one: launch.plan_of(of, known, throughputs, one, items, run=recipe.stem, port=one.parallel.port)
        )[1]
        return made.model_copy(update={"warnings": (*made.warnings, *notes)})

    if fit:
        from homelab.cli import fit as fitting

        return fitting.write(recipe, output, wanted, facts, lambda: make(wanted, loaded, facts), as_json, common.same_options(cluster))
    if what_if:
        return _what_if(what_if, wanted, loaded, facts, make, as_json)
    made = make(wanted, loaded, facts)
    if dry_run and not offline:
        from homelab.control import dryrun

        with Fleet(loaded) as fleet, common.progress(as_json) as say:
            made = dryrun.improve(fleet, made, wanted, facts, say)
    if as_json:
        common.print_json(made.model_dump(mode="json"))
        return 0
    console = Console()
    console.print(report.table(made, why=why))
    options = common.same_options(cluster)
    console.print(f"Next: homelab launch {file_word(str(recipe))}{options}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _what_if(
    texts: list[str], recipe: Recipe, cluster: Cluster, facts: Mapping[str, Facts],
    make: Callable[[Recipe, Cluster, Mapping[str, Facts]], Plan], as_json: bool,
) -> int:  # fmt: skip
    """Print the same recipe on the cluster as it is and as it would be. Where it fits nowhere now, that is what it is compared with."""
    from rich.console import Console

    from homelab.planning import time_report
    from homelab.planning import what_if as hypothesis
    from homelab.planning.fit import DoesNotFit

    changes = hypothesis.parse(texts, cluster, device=hypothesis.device_of(cluster, facts))
    changed = hypothesis.recipe_for(changes, recipe)
    before: Plan | DoesNotFit
    try:
        before = make(changed, cluster, facts)
    except DoesNotFit as error:
        before = error
    after = make(changed, *hypothesis.apply(changes, cluster, facts))
    if as_json:
        sides = {name: time_report.as_json(side) for name, side in (("before", before), ("after", after))}
        common.print_json({"what_if": [change.text for change in changes], **sides})
        return 0
    console = Console()
    console.print(time_report.before_and_after(before, after, ["now", " ".join(change.text for change in changes)]))
    warnings = [before.message] if isinstance(before, DoesNotFit) else before.warnings
    for warning in dict.fromkeys((*warnings, *after.warnings)):
        console.print(f"! {warning}", style="yellow", markup=False, highlight=False)
    console.print("Nothing was started. The whole plan: leave out --what-if.", style="dim")
    return 0
