"""`homelab tensorboard`: the curves of a run in TensorBoard, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, terminal

if TYPE_CHECKING:
    from homelab.controller.features.track.metrics_source import KnownMetrics


def command(
    run: common.RunArgument = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1; 0: a free one.")] = 0,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Show the curves of a run in TensorBoard on 127.0.0.1, each step once. It follows a running run. Ctrl-C ends TensorBoard, not the run."""
    from homelab.controller.base import package
    from homelab.controller.features.track import event_files, tensorboard_server
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup

    package.require("tensorboard", event_files.REQUIREMENT)
    loaded = common.load_cluster(cluster)
    with Fleet(loaded) as fleet:
        with common.progress() as say:
            paths = run_lookup.run(fleet, runs_dir, run, say)

        def serving(address: str, look: KnownMetrics) -> None:
            steps = sum(1 for point in look.points if point.kind == "train")
            terminal.echo(f"{paths.name}: {steps} steps, {look.state}\n{address}\nCtrl-C ends TensorBoard, not the run.")

        tensorboard_server.show(fleet, paths, port=port, say=lambda text: terminal.echo(f". {text}", err=True), serving=serving)
    terminal.echo(f"Next: homelab status {paths.name}{common.same_options(cluster, runs_dir)}")
    return 0
