"""`homelab trust`: accept a node's host key, once, by an explicit yes."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common


def command(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="Nodes, by name. Default: all whose key is not known yet.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you have compared the fingerprints already.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
) -> int:
    """Show the host key of nodes and remember it. A key that CHANGED is refused here too."""
    import sys

    from homelab.errors import HomelabError, InputError, UnreachableError
    from homelab.remote import connect, hostkeys

    loaded = common.load_cluster(cluster, ",".join(nodes or []))
    asked = [node for node in loaded.nodes if node.host != "local"]
    failed: list[HomelabError] = []
    refused: list[str] = []
    for node in asked:
        try:
            offer = connect.offered_key(loaded, node)
        except UnreachableError as error:
            failed.append(error)
            continue
        if offer is None:
            typer.echo(f"{node.name}: its host key is known already")
            continue
        host, port, key = offer
        typer.echo(f"{node.name} ({host}:{port}) shows the host key {key.get_name()} {hostkeys.fingerprint(key)}")
        typer.echo("  compare it on the node itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        try:
            accepted = yes or typer.confirm("  is it the same, and shall it be remembered?", default=False)
        except typer.Abort:
            if sys.stdin.isatty():
                raise  # Ctrl-C
            raise InputError(
                "there is nobody to ask whether this key is right", where=f"node {node.name}, standard input",
                hint=f"compare the fingerprint on the node, then: homelab trust --yes {node.name}",
            ) from None  # fmt: skip
        if accepted:
            path = hostkeys.remember(loaded, host, port, key)
            typer.echo(f"  remembered in {path}")
        else:
            typer.echo("  not remembered")
            refused.append(node.name)
    for other in failed[1:]:
        typer.echo(f"{other.where}: {other.message}", err=True)
    if failed:
        raise failed[0]
    if refused:
        raise HomelabError(
            "these nodes stay unknown: their host keys were not accepted", where=", ".join(f"node {name}" for name in refused),
            hint=f"compare the fingerprints, then: homelab trust {' '.join(refused)}",
        )  # fmt: skip
    typer.echo("Next: homelab preflight" + common.same_options(cluster))
    return 0
