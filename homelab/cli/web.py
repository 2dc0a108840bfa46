"""`homelab web`: a page on this machine that shows the runs while they train."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common, completion, terminal


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run that the page begins with: its name, or its beginning or end. Default: the list of all runs.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="The port. Default: the first free one from 8808 on; 0: any.", show_default=False),
    ] = None,
    lan: Annotated[
        bool,
        typer.Option(
            "--lan",
            help="Open it to your network, too: whoever has the address with its token reads all and can chat. Its buttons do not act then.",
        ),
    ] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Show the runs on a page in your browser, live: nodes, cards, curves, attempts, logs, a chat, buttons that stop and recover. Ctrl-C ends the page, not a run."""
    from homelab.controller.base import package

    for module in ("starlette", "uvicorn"):
        package.require(module, "starlette>=0.40", "uvicorn>=0.30")
    from homelab.controller.features.web import web_server

    loaded = common.load_cluster(cluster)
    place = web_server.bind(port, is_lan=lan)

    def serving(addresses: list[str]) -> None:
        terminal.echo("\n".join(addresses))
        if lan:
            terminal.echo(
                "Everybody on your network who has such an address reads all that this page shows, and can load a run's model to chat with it. "
                "It is not encrypted: use it at home only."
            )
        acts = "" if lan else " and buttons that ask first"
        terminal.echo(f"But for the chat{acts}, the page reads only. Ctrl-C ends the page, not a run.")

    for cut in web_server.serve(loaded, runs_dir, common.options_of(cluster, runs_dir), place, run=run, serving=serving):
        terminal.echo(f"{cut} was not over yet, and was ended with the page. Type it again to finish it.")
    terminal.echo(f"Next: homelab status{common.same_options(cluster, runs_dir)}")
    return 0
