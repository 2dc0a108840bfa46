"""`homelab teardown`: remove from the nodes what setup has made there."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common, completion, terminal


def command(
    nodes: Annotated[
        list[str] | None, typer.Argument(help="Nodes, by name. Default: all.", show_default=False, autocompletion=completion.nodes)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Remove what `homelab setup` has made on the nodes, and nothing else. Runs, checkpoints and shipped code in the workdir stay."""
    import sys

    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.base.units import listed
    from homelab.controller.features.setup import remove_environments
    from homelab.controller.remote.fanout import Fleet

    loaded = common.load_cluster(cluster, ",".join(nodes or []))
    with Fleet(loaded) as fleet:
        with common.progress(as_json) as say:
            say("asking what setup has made")
            folders, errors = remove_environments.made(fleet, [node.name for node in loaded.nodes])
            forgotten = remove_environments.forget_secrets(fleet, folders)
        having = [name for name, paths in folders.items() if paths]
        if not as_json:
            for name, paths in folders.items():
                terminal.echo(f"{name}: {', '.join(paths) or 'nothing was made by setup'}")
            for name, runs in forgotten.items():
                terminal.echo(f"{name}: the token of {listed(runs)} on it was removed")
        if having and not yes:
            if as_json or not sys.stdin.isatty():
                raise InputError(
                    "there is no terminal to ask whether these folders may be removed",
                    where="standard input",
                    hint=homelab("teardown --yes", *having),
                )
            if not terminal.confirm("remove them?"):
                return 1
        with common.progress(as_json) as say:
            say("removing")
            removed, failed = remove_environments.remove(fleet, having, say)
    errors |= failed
    if as_json:
        gone = {name: list(entry.removed) for name, entry in removed.items()}
        common.print_json(
            {"removed": gone, "secrets_removed": forgotten, "errors": {name: error.as_dict() for name, error in errors.items()}}
        )
        return next(iter(errors.values())).exit_code if errors else 0
    common.raise_first(errors.values())
    terminal.echo(f"Removed from {len(removed)} node{'' if len(removed) == 1 else 's'}." if removed else "Nothing to remove.")
    return 0
