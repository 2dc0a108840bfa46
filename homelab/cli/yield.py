"""`homelab yield`: give a node back to its owner for a while; the runs go on without it, and take it back."""  # noqa: N999 - a word of Python, and the name of the command

from __future__ import annotations

import time
from typing import Annotated

import typer

from homelab.cli import common, completion, terminal


def command(
    node: Annotated[str, typer.Argument(help="The node that somebody wants.", show_default=False, autocompletion=completion.nodes)],
    for_text: Annotated[str, typer.Option("--for", metavar="2h", help="For so long: 90min, 2h, 1h30min.", show_default=False)] = "",
    until_text: Annotated[
        str, typer.Option("--until", metavar="HH:MM", help="Until this time of day, by the clock of this machine.", show_default=False)
    ] = "",
    back: Annotated[bool, typer.Option("--back", help="Take it back now.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Give a node back to its owner: its run saves, and goes on without it. Without a time, until --back."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import Hint, homelab
    from homelab.controller.features.leave import ask_leave
    from homelab.controller.remote.fanout import Fleet

    now = time.time()
    if back and (for_text or until_text):
        raise InputError(
            "--back takes the node back now, and an end of its leave is named, too", where=f"homelab yield {node} --back",
            hint=Hint("leave one of them out: {}", homelab("yield", node, "--back")),
        )  # fmt: skip
    one = ask_leave.wish(node, for_text, until_text, now)
    loaded = common.load_cluster(cluster)
    ask_leave.refuse_unknown(node, [other.name for other in loaded.nodes], cluster)
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        left = ask_leave.take_back(fleet, runs_dir, node) if back else ask_leave.give_back(fleet, runs_dir, one, say)
    if as_json:
        common.print_json(left.as_dict())
        return 0
    options = common.same_options(cluster, runs_dir)
    for line in ask_leave.lines(left, now):
        terminal.echo(line)
    terminal.echo(f"Next: homelab {'status' if back else f'yield {node} --back'}{options}")
    return 0
