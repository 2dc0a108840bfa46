"""`homelab launch`: preflight, plan, ship and start, detached; or with --wait, stay until it ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common
from homelab.cli.run_command import RunCommand

if TYPE_CHECKING:
    from homelab.controller.config.profile_request import ProfiledSteps
    from homelab.controller.features.launch.launch_run import LaunchRequest
    from homelab.controller.features.launch.prepare import Prepared
    from homelab.controller.planning.types import Plan
    from homelab.controller.run.paths import RunPaths


def command(
    recipe: common.RecipeArgument,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    skip: common.SkipOption = [],  # noqa: B006
    wait: common.WaitOption = False,
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be executed on each node; start nothing.")] = False,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="STEPS",
            help="Profile this number of steps after the first ones (3), or these steps (8-10), with torch.profiler. `homelab profile` shows the result.",
        ),
    ] = "",
    profile_ranks: Annotated[str, typer.Option("--profile-ranks", metavar="RANKS", help="Only on these ranks: 0,2")] = "",
    wake: Annotated[bool, typer.Option("--wake", help="Wake the nodes that sleep first, as `homelab wake` does.")] = False,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Start a recipe on the cluster. The run continues when this terminal or this machine is gone."""
    from homelab.cli.wake import before
    from homelab.controller.checks import registry
    from homelab.controller.config import profile_request
    from homelab.controller.features.launch.launch_run import LaunchRequest

    request = LaunchRequest(
        recipe, cluster, runs_dir, registry.skipped(only=[], skip=skip), common.supervise_where(supervise, no_supervise), is_dry_run=dry_run,
        profile=profile_request.parse(profile, profile_ranks),
    )  # fmt: skip
    if wake:
        before(common.load_cluster(cluster, nodes))
    return launched(request, nodes, wait=wait, as_json=as_json)


def launched(request: LaunchRequest, nodes: str, *, wait: bool, as_json: bool) -> int:
    """Launch what is asked for; the exit code."""
    from homelab.controller.config.interpreter import for_recipe
    from homelab.controller.config.load import load_recipe
    from homelab.controller.features.launch.launch_run import launch_run
    from homelab.controller.remote.fanout import Fleet

    loaded, training = common.load_cluster(request.cluster_file, nodes), load_recipe(request.recipe_file)
    view = _View(request.cluster_file, request.runs_dir, as_json, request.recipe_file)
    with Fleet(for_recipe(loaded, training)) as fleet:
        paths = launch_run(fleet, training, request, view)
        return view.wait(fleet, paths) if wait and paths is not None else 0


@dataclass
class _View(RunCommand):
    """See `homelab.controller.features.launch.launch_run.LaunchView`."""

    recipe_file: Path

    def checked(self, prepared: Prepared) -> Prepared:
        """The table of the findings, where one is worth it."""
        from dataclasses import replace

        from homelab.controller.checks import presentation

        prepared = replace(prepared, findings=common.for_same_files(prepared.findings, self.cluster_file, self.runs_dir, self.recipe_file))
        if not self.as_json and presentation.worst(prepared.findings) != "ok":
            self.console.print(
                presentation.table(prepared.findings, [node.name for node in prepared.evidence.cluster.nodes]), soft_wrap=True
            )
        return prepared

    def planned(self, plan: Plan) -> None:
        """What would be executed."""
        from homelab.controller.planning.render import plan_table

        if self.as_json:
            self.json(plan.model_dump(mode="json"))
            return
        self.console.print(plan_table.table(plan, why=True, commands=True))
        self.console.print("Nothing was started (--dry-run). To start it: the same command without --dry-run.")

    def started(self, paths: RunPaths, plan: Plan, profiled: ProfiledSteps | None) -> None:
        """The run's name, and the commands that come next."""
        names = [node.name for node in plan.nodes]
        if self.as_json:
            profile = {} if profiled is None else {"profile": asdict(profiled)}
            self.json({"run": paths.name, "folder": str(paths.root), "head": plan.head, "nodes": names, "attempt": 1, **profile})
            return
        self.console.print(f"run {paths.name} is starting on {', '.join(names)} (head: {plan.head})")
        for label, verb in (("follow ", "status"), ("logs   ", "logs"), ("stop   ", "stop"), ("recover", "recover")):
            self.line(f"  {label}  homelab {verb} {paths.name}{self.options}")
        if profiled is not None:
            self.line(f"  profile  homelab profile {paths.name}{self.options}   (after step {profiled.last_step})")
