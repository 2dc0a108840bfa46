"""`homelab recover`: say what happened, and go on from the newest complete checkpoint on the nodes that are well."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Where no checkpoint is left: begin again at step 0.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay, show the dashboard, and leave with the run's exit code.")
    ] = False,
    skip: common.SkipOption = [],  # noqa: B006
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Find the cause of a failure, replan on the nodes that are well, and start the next attempt."""
    from rich.console import Console

    from homelab.checks import registry
    from homelab.control import find, recover, watch
    from homelab.diagnose import cause
    from homelab.remote.fanout import Fleet

    wanted = [node.name for node in common.load_cluster(cluster, nodes).nodes]
    options = common.same_options(cluster, runs_dir)
    console = Console(stderr=as_json)  # --json leaves stdout to the JSON document
    with Fleet(common.load_cluster(cluster)) as fleet:
        with common.progress(as_json) as say:
            paths = find.run(fleet, runs_dir, run, say)
            found = recover.examine(fleet, paths, say)
        if not as_json and found.diagnosis is not None:
            console.print(cause.render(found.diagnosis))
        with common.progress(as_json) as say:
            skipped = registry.skipped(only=[], skip=skip)
            plan = recover.resume(fleet, paths, found, nodes=wanted, skip=skipped, from_scratch=from_scratch, say=say)
        if as_json:
            common.print_json({
                "run": paths.name, "attempt": plan.attempt, "resume_step": plan.resume_step, "nodes": [node.name for node in plan.nodes],
                "left_out": list(plan.left_out), "diagnosis": found.diagnosis.model_dump(mode="json") if found.diagnosis else None,
            })  # fmt: skip
        else:
            begins = f"after step {plan.resume_step}" if plan.resume_step else "at step 0"
            console.print(
                f"attempt {plan.attempt} of [bold]{paths.name}[/bold] goes on {begins} on {', '.join(node.name for node in plan.nodes)}"
            )
            for warning in plan.warnings:
                console.print(f"  {warning}", markup=False, highlight=False)
            console.print(
                f"  follow   homelab status {paths.name}{options}", markup=False, highlight=False, soft_wrap=True
            )
        if wait:
            return watch.wait(fleet, paths, console=console, options=options)
    return 0
