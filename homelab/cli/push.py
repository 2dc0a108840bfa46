"""`homelab push`: the trained model goes to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, terminal


def command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] REPO", help="The run (default: the only or newest one), and NAME/MODEL on the hub.", show_default=False
        ),
    ],
    merged: Annotated[bool, typer.Option("--merged", help="Upload the result of `homelab merge`.")] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="NAME/MODEL",
            help="The name of the base model on the hub, if the recipe names a folder.",
            show_default=False,
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Upload the trained adapter (or model) to the Hugging Face hub. A new repository is private. The files are first copied to this machine."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.results import hub, push

    if len(words) > 2:
        raise InputError("too many arguments", where=" ".join(words), hint=homelab("push", "RUN", "NAME/MODEL"))
    wanted = push.PushRequest(hub.checked_name(words[-1]), base_model, is_merged=merged, is_public=public)
    with common.fleet_of_run(words[0] if len(words) == 2 else None, cluster, runs_dir, as_json) as (fleet, paths, say):
        place = Path("models") / (f"{paths.name}-merged" if merged else paths.name)
        done = push.push(fleet, paths, place, wanted, say)
    if as_json:
        common.print_json(done.model_dump())
        return 0
    terminal.echo(f"{done.run}: {len(done.files)} files are in {done.repository}; a copy is in {done.folder}")
    terminal.echo(f"Next: {done.address}")
    return 0
