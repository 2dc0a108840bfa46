"""`homelab recover`: say what happened, and go on from the newest complete checkpoint on the nodes that are well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from homelab.cli import common

if TYPE_CHECKING:
    from homelab.planning.model import Plan
    from homelab.remote.fanout import Fleet
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
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    skip: common.SkipOption = [],  # noqa: B006
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Find the cause of a failure, replan on the nodes that are well, and start the next attempt."""
    import sys
    from contextlib import ExitStack

    from rich.console import Console

    from homelab.checks import registry
    from homelab.control import by_hand, claims, find, identity, recover, watch
    from homelab.control.detach import Supervision, Where
    from homelab.diagnose import cause
    from homelab.remote.fanout import Fleet

    wanted = [node.name for node in common.load_cluster(cluster, nodes).nodes]
    options = common.same_options(cluster, runs_dir)
    console = Console(stderr=as_json)  # --json leaves stdout to the JSON document
    alone, spinner = ExitStack(), ExitStack()

    def announce(plan: Plan) -> None:
        spinner.close()  # on a terminal it would take what is printed now for its own
        if as_json:
            common.print_json({
                "run": paths.name, "attempt": plan.attempt, "resume_step": plan.resume_step, "nodes": [node.name for node in plan.nodes],
                "left_out": list(plan.left_out), "notes": notes, "warnings": list(plan.warnings), "diagnosis": found.diagnosis.model_dump(mode="json") if found.diagnosis else None,
            })  # fmt: skip
            sys.stdout.flush()
            return
        begins = f"after step {plan.resume_step}" if plan.resume_step else "at step 0"
        console.print(f"attempt {plan.attempt} of [bold]{paths.name}[/bold] goes on {begins} on {', '.join(node.name for node in plan.nodes)}")
        for warning in plan.warnings:
            console.print(f"  {warning}", markup=False, highlight=False)
        console.print(f"  follow   homelab status {paths.name}{options}", markup=False, highlight=False, soft_wrap=True)

    def leave(plan: Plan) -> None:
        """Before a Ctrl-C counts again, and whatever becomes of the announcement: a run is left with its supervisor, or not at all."""
        try:
            announce(plan)
        finally:
            alone.close()  # the supervisor holds the same lock, and claims the run when it fails
            with common.progress(as_json) as say:
                told = common.leave_supervisor(supervision, fleet, paths, cluster, wanted, say)
        if told:
            console.print(f"  supervisor  {told}", soft_wrap=True, markup=False, highlight=False)

    with Fleet(common.load_cluster(cluster)) as fleet, alone:
        with common.progress(as_json) as say:
            paths = find.run(fleet, runs_dir, run, say)
            wants_supervisor = find.recipe_of(paths)[1].recovery.auto and not no_supervise and supervise != "no"
            alone.enter_context(by_hand.alone(paths, options, wants_supervisor=wants_supervisor))
            _refuse_supervised(fleet, paths, options)
            claim = alone.enter_context(claims.claimed(fleet, paths.name, [node.name for node in fleet.cluster.nodes], "recovered by hand"))
            found = recover.examine(fleet, paths, say)
        if not as_json and found.diagnosis is not None:
            console.print(cause.render(found.diagnosis))
        notes = identity.changed_here(find.recipe_of(paths)[0], options)
        for note in notes if not as_json else ():
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        with spinner:
            say = spinner.enter_context(common.progress(as_json))
            skipped = registry.skipped(only=[], skip=skip)
            scratch: recover.Scratch = "always" if from_scratch else "never"
            halted = recover.halt(fleet, claim, paths, found, nodes=wanted, from_scratch=scratch, say=say)
            last = find.plan_of(paths)
            supervision = Supervision(cast(Where, supervise) if wants_supervisor else "no")
            head = last.head if last.head in halted.names else halted.names[0]
            addresses = {node.name: node.lan_address for node in last.nodes}
            with supervision.tried(fleet, paths.name, head, wanted, addresses, say, silent=halted.unreachable):
                recover.resume(fleet, claim, paths, found, halted, nodes=wanted, skip=skipped, say=say, announce=leave)
        if wait:
            return watch.wait(fleet, paths, console=console, options=options)
    return 0


def _refuse_supervised(fleet: Fleet, paths: RunPaths, options: str) -> None:
    """Two that recover the same run would stop each other's attempts: its supervisor may be on a node (`by_hand.alone` asks this machine)."""
    from homelab.checks.commands import on_node
    from homelab.control import head_supervisor
    from homelab.errors import InputError

    away = head_supervisor.at_work(fleet, paths)
    if away is not None:
        name, reply = away
        kill = on_node(fleet.cluster.node(name), f"kill {reply.pid or 'PID'}")
        raise InputError(
            f"this run has a supervisor that recovers it by itself; now it is {reply.doing or 'at work'}: {reply.why}",
            where=f"{paths.name}, process {reply.pid or '?'} on {name}",
            hint=f"homelab status {paths.name}{options}; to do it by hand: {kill}, then once more",
        )
