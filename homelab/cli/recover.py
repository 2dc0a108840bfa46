"""`homelab recover`: say what happened, and go on from the newest complete checkpoint on the nodes that are well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.runs.paths import RunPaths


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
    supervise: common.SuperviseOption = True,
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
            _refuse_supervised(paths, options)
            found = recover.examine(fleet, paths, say)
        if not as_json and found.diagnosis is not None:
            console.print(cause.render(found.diagnosis))
        with common.progress(as_json) as say:
            skipped = registry.skipped(only=[], skip=skip)
            scratch: recover.Scratch = "always" if from_scratch else "never"
            halted = recover.halt(fleet, paths, found, nodes=wanted, from_scratch=scratch, say=say)
            plan = recover.resume(fleet, paths, found, halted, nodes=wanted, skip=skipped, say=say)
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
        if supervise and find.recipe_of(paths)[1].recovery.auto:
            common.leave_supervisor(paths, cluster, wanted)
        if wait:
            return watch.wait(fleet, paths, console=console, options=options)
    return 0


def _refuse_supervised(paths: RunPaths, options: str) -> None:
    """Two that recover the same run would stop each other's attempts."""
    from homelab.errors import InputError
    from homelab.runs import lock, store

    if lock.is_held(paths):
        state = store.read_object(paths.supervisor_json)
        raise InputError(
            f"this run has a supervisor that recovers it by itself; now it is {state.get('doing', 'at work')}: {state.get('why', '')}",
            where=f"{paths.name}, process {state.get('pid', '?')} on this machine",
            hint=f"homelab status {paths.name}{options}; to do it by hand: kill {state.get('pid', 'PID')}, then once more",
        )
