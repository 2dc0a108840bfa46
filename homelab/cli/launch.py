"""`homelab launch`: preflight, plan, ship and start, detached; or with --wait, stay until it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.runs.paths import RunPaths


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe file.", show_default=False)],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    skip: common.SkipOption = [],  # noqa: B006
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay, show the dashboard, and leave with the run's exit code.")
    ] = False,
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be executed on each node; start nothing.")
    ] = False,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Start a recipe on the cluster. It outlives this terminal and this machine."""
    import sys
    import time
    from contextlib import ExitStack
    from dataclasses import replace

    from rich.console import Console

    from homelab.checks import registry, report
    from homelab.config.interpreter import for_recipe
    from homelab.config.load import load_recipe
    from homelab.control import claims, launch, watch
    from homelab.control.detach import Supervision, Where
    from homelab.planning import report as plan_report
    from homelab.remote.fanout import Fleet
    from homelab.runs import store

    loaded, wanted = common.load_cluster(cluster, nodes), load_recipe(recipe)
    loaded = for_recipe(loaded, wanted)
    skipped = registry.skipped(only=[], skip=skip)
    console = Console(stderr=as_json)  # --json leaves stdout to the JSON document
    options = common.same_options(cluster, runs_dir)
    spinner, unused = ExitStack(), ExitStack()

    def name_beside(others: set[str]) -> str:
        taken = others | {paths.name for paths in store.runs_in(runs_dir)}
        if dry_run:
            return store.new_name(recipe.stem, time.time(), taken)
        name = store.take_name(runs_dir, recipe.stem, time.time(), taken)
        unused.callback(store.give_back, runs_dir, name)
        return name

    def announce(paths: RunPaths) -> None:
        spinner.close()  # on a terminal it would take what is printed now for its own
        plan = prepared.plan
        assert plan is not None
        names = [node.name for node in plan.nodes]
        if as_json:
            common.print_json({"run": paths.name, "folder": str(paths.root), "head": plan.head, "nodes": names, "attempt": 1})
            sys.stdout.flush()
            return
        console.print(f"run [bold]{paths.name}[/bold] is starting on {', '.join(names)} (head: {plan.head})")
        for what, verb in (("follow ", "status"), ("logs   ", "logs"), ("stop   ", "stop"), ("recover", "recover")):
            console.print(f"  {what}  homelab {verb} {paths.name}{options}", soft_wrap=True, markup=False, highlight=False)

    def leave(paths: RunPaths) -> None:
        """Before a Ctrl-C counts again, and whatever becomes of the announcement: a run is left with its supervisor, or not at all."""
        try:
            announce(paths)
        finally:
            with common.progress(as_json) as say:
                told = common.leave_supervisor(supervision, fleet, paths, cluster, names, say)
        if told:
            console.print(f"  supervisor  {told}", soft_wrap=True, markup=False, highlight=False)

    with Fleet(loaded) as fleet, unused:
        with common.progress(as_json) as say:
            prepared = launch.prepare(fleet, wanted, recipe, name_beside=name_beside, skip=skipped, say=say)
        prepared = replace(prepared, findings=common.for_cluster(prepared.findings, cluster, runs_dir))
        if not as_json and report.worst(prepared.findings) != "ok":
            console.print(report.table(prepared.findings, [node.name for node in loaded.nodes]), soft_wrap=True)
        launch.refuse_on_failure(prepared)
        assert prepared.plan is not None
        wants_supervisor = wanted.recovery.auto and not no_supervise and supervise != "no"
        supervision = Supervision(cast(Where, supervise) if wants_supervisor else "no")
        if dry_run:
            with common.progress(as_json) as say:
                supervision.rehearse(fleet, prepared.plan, say)
            if as_json:
                common.print_json(prepared.plan.model_dump(mode="json"))
            else:
                console.print(plan_report.table(prepared.plan, why=True))
                console.print("Nothing was started (--dry-run). To start it: the same without --dry-run.")
            return 0
        with spinner:
            say = spinner.enter_context(common.progress(as_json))
            say(f"run {prepared.plan.run}")
            plan, plan_text = prepared.plan, plan_report.text(prepared.plan)
            addresses = {node.name: node.lan_address for node in plan.nodes}
            names = list(addresses)
            with (
                claims.claimed(fleet, plan.run, names, "launched", is_launch=True) as claim,
                supervision.tried(fleet, plan.run, plan.head, names, addresses, say),
            ):
                paths = launch.launch(
                    fleet, claim, prepared, runs_dir, wants_supervisor=wants_supervisor, skipped=skipped, plan_text=plan_text, say=say, announce=leave
                )
        if wait:
            return watch.wait(fleet, paths, console=console, options=options)
    return 0
