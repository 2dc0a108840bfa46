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
    from homelab.errors import HomelabError, UnreachableError
    from homelab.remote import hostkeys, ssh

    loaded = common.load_cluster(cluster, ",".join(nodes or []))
    asked = [node for node in loaded.nodes if node.host != "local"]
    failed: HomelabError | None = None
    for node in asked:
        try:
            offer = ssh.offered_key(loaded, node)
        except UnreachableError as error:
            typer.echo(f"{node.name}: {error.message}", err=True)
            failed = failed or error
            continue
        if offer is None:
            typer.echo(f"{node.name}: its host key is known already")
            continue
        host, port, key = offer
        typer.echo(f"{node.name} ({host}:{port}) shows the host key {key.get_name()} {hostkeys.fingerprint(key)}")
        typer.echo("  compare it on the node itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        if yes or typer.confirm("  is it the same, and shall it be remembered?", default=False):
            path = hostkeys.remember(loaded, host, port, key)
            typer.echo(f"  remembered in {path}")
        else:
            typer.echo("  not remembered")
    if failed:
        raise failed
    typer.echo("Next: homelab preflight" + common.same_options(cluster))
    return 0
