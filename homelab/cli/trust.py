"""`homelab trust`: accept a node's host key, once, by an explicit yes."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common, completion, terminal
from homelab.controller.base.hint import Hint, homelab


def command(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Nodes, by name. Default: all whose key is not known yet.", show_default=False, autocompletion=completion.nodes
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you have compared the fingerprints already.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
) -> int:
    """Show the host key of nodes and save it. A key that CHANGED is refused here, too."""
    from homelab.cli.questions import accepts_host_key
    from homelab.controller.base.errors import HomelabError, UnreachableError
    from homelab.controller.remote import ssh_login

    loaded = common.load_cluster(cluster, ",".join(nodes or []))
    remote = [node for node in loaded.nodes if node.host != "local"]
    failed: list[HomelabError] = []
    refused: list[str] = []
    for node in remote:
        try:
            key = ssh_login.offered_key(loaded, node)
        except UnreachableError as error:
            failed.append(error)
            continue
        if key.is_known:
            terminal.echo(f"{node.name}: its host key is known already")
            continue
        accepted = accepts_host_key(
            node.name, key, yes=yes, hint=Hint("compare the fingerprint on the node, then: {}", homelab("trust --yes", node.name))
        )
        if accepted:
            path = key.remember(loaded)
            terminal.echo(f"  remembered in {path}")
        else:
            terminal.echo("  not remembered")
            refused.append(node.name)
    for other in failed[1:]:
        terminal.echo(f"{other.where}: {other.message}", err=True)
    if failed:
        raise failed[0]
    if refused:
        raise HomelabError(
            "these nodes stay unknown: their host keys were not accepted", where=", ".join(f"node {name}" for name in refused),
            hint=Hint("compare the fingerprints, then: {}", homelab("trust", *refused)),
        )  # fmt: skip
    terminal.echo("Next: homelab preflight" + common.same_options(cluster))
    return 0
