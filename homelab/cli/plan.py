"""`homelab plan`: who does what, does it fit, and why; runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion

if TYPE_CHECKING:
    from rich.console import RenderableType

    from homelab.controller.planning.inputs import PlanInputs
    from homelab.controller.planning.types import Plan
    from homelab.controller.planning.verdict import Verdict

LikeOption = Annotated[
    str,
    typer.Option(
        "--like",
        metavar="NODE",
        help="The node that --what-if-nodes copies. Default: the one of middle speed.",
        show_default=False,
        autocompletion=completion.nodes,
    ),
]
LauncherOption = Annotated[
    str, typer.Option("--launcher", help="Show the commands or the document of this launcher.", autocompletion=completion.launchers)
]


def command(
    recipe: common.RecipeArgument,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    offline: Annotated[bool, typer.Option("--offline", help="Ask no node; use cluster.toml alone.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Also print memory by item, all strategies, and the reason of each choice.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Also print what is executed on each node.")] = False,
    what_if: Annotated[
        list[str],
        typer.Option(
            "--what-if",
            help="Compare with one more machine (+RTX3090, +2xRTX3090), without a node (-laptop) or with another network (wire=2.5gbit); repeatable.",
        ),
    ] = [],  # noqa: B006
    what_if_nodes: Annotated[
        str,
        typer.Option(
            "--what-if-nodes",
            metavar="COUNTS",
            help="Plan each of these numbers of machines, 1..10 or 2,4,8: your machines first, then copies of one.",
            show_default=False,
        ),
    ] = "",
    like: LikeOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run/--no-dry-run", help="Try a training step without weights on one node.")] = True,
    fit: Annotated[bool, typer.Option("--fit", help="Write a copy of the recipe that fits into the free memory.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="The file that --fit writes. Default: RECIPE-fit.toml.", show_default=False)
    ] = None,
    launcher: LauncherOption = "torchrun-ssh",
    as_json: common.JsonOption = False,
) -> int:
    """Say whether the training fits, how long it takes, and who does what. Nothing is started."""
    from homelab.controller.attempt import planner
    from homelab.controller.base.errors import InputError
    from homelab.controller.config.interpreter import for_recipe
    from homelab.controller.config.load import load_recipe
    from homelab.controller.features.preflight import plan_inputs
    from homelab.controller.planning.render import plan_table

    if output is not None and not fit:
        raise InputError("--output names the file of --fit, but --fit is missing", where="--output", hint="add --fit")
    if like and not what_if_nodes:
        raise InputError(
            "--like names the node that --what-if-nodes copies, but --what-if-nodes is missing",
            where="--like",
            hint="add --what-if-nodes 1..10",
        )
    counts = _counts(what_if_nodes)
    training = load_recipe(recipe)
    machines = (common.described_cluster if offline else common.load_cluster)(cluster, nodes)
    with common.progress(as_json) as say:
        gathered = plan_inputs.gather_for_plan(for_recipe(machines, training), training, recipe, offline=offline, say=say)
    inputs = gathered.inputs

    def make(of: PlanInputs) -> Plan:
        plan = planner.settled(of, launcher)[1]
        return plan.model_copy(update={"warnings": (*plan.warnings, *gathered.notes)})

    if fit:
        from homelab.cli import fit as fitting

        return fitting.write(
            recipe, output, inputs, make, as_json, common.same_options(cluster, nodes=nodes) + (" --offline" if offline else "")
        )
    if counts:
        return _scaling(counts, like or None, what_if, inputs, make, as_json)
    if what_if:
        return _what_if(what_if, inputs, make, as_json)
    plan = make(inputs)
    if dry_run and not offline:
        with common.progress(as_json) as say:
            plan = plan_inputs.tried(plan, inputs, say)
    judged = gathered.judged(plan)
    if as_json:
        document = {"document": plan.document.model_dump()} if plan.document else {}
        common.print_json(plan.model_dump(mode="json") | document | {"verdict": judged.as_dict()})
        return judged.exit_code
    _print(
        plan,
        judged,
        recipe,
        (
            common.same_options(cluster),
            common.same_options(cluster, nodes=nodes) + (" --offline" if offline and judged.command.startswith("plan") else ""),
        ),
        plan_table.table(plan, why=why, commands=commands),
    )
    return judged.exit_code


def _print(plan: Plan, judged: Verdict, recipe: Path, options: tuple[str, str], table: RenderableType) -> None:
    """`options`: those of a command in a hint, and those of the next command."""
    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.base.hint import for_recipe, with_options
    from homelab.controller.base.shell import file_word
    from homelab.controller.planning.render import answer

    console = CleanConsole()
    style = "bold" if judged.runs else "yellow" if judged.runs is None else "red"
    console.print(answer.of(plan, judged), style=style, soft_wrap=not console.is_terminal, markup=False, highlight=False)
    if not judged.runs:
        edit = for_recipe(with_options(judged.edit, lambda name: options[0]), str(recipe))
        console.print(f"First: {edit}", style=style, soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    if plan.document is not None:  # as it is: a line that is broken at the terminal's width is another document
        console.print(f"\n{plan.document.file_name}, which starts it on all nodes", style="bold", markup=False, highlight=False)
        console.print(plan.document.text, soft_wrap=True, markup=False, highlight=False, emoji=False)
        return
    verb, _, option = judged.command.partition(" ")
    console.print(
        f"Next: homelab {verb} {file_word(str(recipe))}{' ' if option else ''}{option}{options[1]}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _what_if(texts: list[str], inputs: PlanInputs, make: Callable[[PlanInputs], Plan], as_json: bool) -> int:
    """Print the same recipe on the cluster as it is and as it would be. Where it fits nowhere now, that is what it is compared with."""
    from dataclasses import replace

    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.planning.alternatives import what_if as hypothesis
    from homelab.controller.planning.machines.machines import device_of
    from homelab.controller.planning.memory.scenario import DoesNotFit
    from homelab.controller.planning.render import time_table

    changes = hypothesis.parse(texts, inputs.cluster, device=device_of(inputs.cluster, inputs.facts))
    inputs = replace(inputs, recipe=hypothesis.recipe_for(changes, inputs.recipe))
    before: Plan | DoesNotFit
    try:
        before = make(inputs)
    except DoesNotFit as error:
        before = error
    cluster, facts = hypothesis.apply(changes, inputs.cluster, inputs.facts)
    facts, throughputs = hypothesis.with_wire(changes, cluster, facts, inputs.throughputs)
    after = make(replace(inputs, cluster=cluster, facts=facts, throughputs=throughputs))
    if as_json:
        sides = {name: time_table.as_json(side) for name, side in (("before", before), ("after", after))}
        common.print_json({"what_if": [change.text for change in changes], **sides})
        return 0
    console = CleanConsole()
    console.print(time_table.before_and_after(before, after, ["now", " ".join(change.text for change in changes)]))
    warnings = hypothesis.assumed(changes, inputs.cluster, inputs.throughputs)
    warnings += [before.message] if isinstance(before, DoesNotFit) else before.warnings
    for warning in dict.fromkeys((*warnings, *after.warnings)):
        console.print(f"! {warning}", style="yellow", markup=False, highlight=False)
    console.print("Nothing was started. For the whole plan, leave out --what-if.", style="dim")
    return 0


def _counts(text: str) -> tuple[int, ...]:
    from homelab.controller.planning.alternatives import scaling

    return scaling.parse_counts(text) if text else ()


def _scaling(
    counts: tuple[int, ...], like: str | None, texts: list[str], inputs: PlanInputs, make: Callable[[PlanInputs], Plan], as_json: bool
) -> int:
    """Print how the recipe does on so many machines, on the wire and with the machines of --what-if where there is one."""
    from dataclasses import replace

    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.planning.alternatives import scaling
    from homelab.controller.planning.alternatives import what_if as hypothesis
    from homelab.controller.planning.machines.machines import device_of
    from homelab.controller.planning.render import scaling_table

    changes = hypothesis.parse(texts, inputs.cluster, device=device_of(inputs.cluster, inputs.facts))
    cluster, facts = hypothesis.apply(changes, inputs.cluster, inputs.facts)
    facts, throughputs = hypothesis.with_wire(changes, cluster, facts, inputs.throughputs)
    changed = replace(inputs, cluster=cluster, facts=facts, throughputs=throughputs, recipe=hypothesis.recipe_for(changes, inputs.recipe))
    is_wire_assumed = any(change.bytes_per_s for change in changes)
    with common.progress(as_json) as say:
        planned = 0

        def counted(of: PlanInputs) -> Plan:
            nonlocal planned
            planned += 1
            say(f"plan {planned} of {len(counts) + 1}")
            return make(of)

        curve = scaling.curve(changed, counts, counted, like=like, is_wire_assumed=is_wire_assumed)
    notes = (*hypothesis.assumed(changes, inputs.cluster, inputs.throughputs), *curve.notes)
    curve = curve.model_copy(update={"notes": notes})
    if as_json:
        common.print_json({"what_if": [change.text for change in changes], **curve.model_dump(mode="json")})
        return 0
    console = CleanConsole()
    console.print(scaling_table.table(curve))
    console.print("Nothing was started. For the plan of your machines, leave out --what-if-nodes.", style="dim")
    return 0
