"""`homelab wake`: switch on nodes that sleep, by a packet for their network cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from homelab.controller.config.cluster import Cluster
    from homelab.controller.features.wake.wake import Woken


def command(
    nodes: Annotated[
        list[str] | None, typer.Argument(help="Nodes, by name. Default: all.", show_default=False, autocompletion=completion.nodes)
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Wake nodes that sleep or are switched off (Wake-on-LAN), and wait until they answer. homelab knows their network cards from the last time that they answered."""
    from homelab.controller.features.wake import wake

    loaded = common.load_cluster(cluster)
    names = [node.name for node in common.load_cluster(cluster, ",".join(nodes or [])).nodes]
    with common.progress(as_json) as say:
        done, errors = wake.wake(loaded, names, say)
    if as_json:
        common.print_json(
            {
                "nodes": {name: done[name].model_dump() for name in names},
                "errors": {name: error.as_dict() for name, error in errors.items()},
            }
        )
        return next(iter(errors.values())).exit_code if errors else 0
    for name in names:
        terminal.echo(f"{name}: {_words(done[name])}")
    common.raise_first(errors.values())
    terminal.echo("Next: homelab preflight" + common.same_options(cluster))
    return 0


def before(cluster: Cluster) -> None:
    """`launch --wake`: all nodes of `cluster` awake. Raises the first error of a node that stays silent."""
    from homelab.controller.features.wake import wake

    with common.progress() as say:
        done, errors = wake.wake(cluster, [node.name for node in cluster.nodes], say)
    for name, entry in done.items():
        if entry.state == "woken":
            terminal.echo(f"{name}: {_words(entry)}", err=True)
    common.raise_first(errors.values())


def _words(woken: Woken) -> str:
    if woken.state == "awake":
        return "awake" + {True: "; a packet wakes it", False: "; its network card is not set up to wake it", None: ""}[woken.wakes]
    return {"woken": f"woken: it answers after {woken.seconds} s", "silent": "it stays silent", "unknown": "it does not answer"}[
        woken.state
    ]
