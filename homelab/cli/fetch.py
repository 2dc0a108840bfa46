"""`homelab fetch`: the trained model comes to this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, terminal

FolderArgument = Annotated[Path | None, typer.Argument(metavar="DIR", help="The folder to write. Default: models/RUN.", show_default=False)]


def command(
    run: common.RunArgument = None,
    folder: FolderArgument = None,
    merged: Annotated[bool, typer.Option("--merged", help="Fetch the result of `homelab merge`.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Copy the trained adapter (or model) to this machine, with tokenizer and model card, or what your own program has saved.

    A fetch that was cut off continues; a second one changes nothing.
    """
    from homelab.controller.base.sanitize import plain
    from homelab.controller.base.units import decimal_size
    from homelab.controller.features.results import fetch
    from homelab.controller.run import run_record, store

    with common.fleet_of_run(run, cluster, runs_dir, as_json) as (fleet, paths, say):
        place = folder or Path("models") / (f"{paths.name}-merged" if merged else paths.name)
        done = (fetch.merged if merged else fetch.model)(fleet, paths, place, say)
        scores = run_record.scores(store.read_object(paths.run_json))
    if as_json:
        common.print_json(done.model_dump())
        return 0
    for name in done.left_out:
        why = "it is a link, or its name cannot be used here" if done.is_program else "only safetensors, GGUF and text are fetched"
        terminal.echo(f"note: {plain(name)} stays on {done.node}: {why}", err=True)
    for name in done.others:
        terminal.echo(f"note: the program has also saved on {name}; these files are from {done.node}", err=True)
    what = f"checkpoint {done.step} of {done.run}" if done.step is not None else done.run
    if done.changed:
        terminal.echo(
            f"{what}: {done.files} files, {decimal_size(done.total_bytes)} ({decimal_size(done.fetched_bytes)} fetched from {done.node}) in {done.folder}"
        )
    else:
        terminal.echo(f"{what} is in {done.folder}, {done.files} files, the same as on {done.node}. Nothing was changed.")
    if done.is_program:
        terminal.echo("Next: load it with the program that wrote it; a .pt or .bin file may hold code: torch.load(..., weights_only=True)")
        return 0
    if scores:
        terminal.echo(
            "Next: load it with AutoModelForSequenceClassification of transformers (an adapter: PEFT's AutoPeftModelForSequenceClassification), num_labels=1"
        )
        return 0
    same = common.same_options(cluster, runs_dir)
    terminal.echo(f"Next: {f'vllm serve {shlex.quote(str(place))}; or ' if merged else ''}homelab gguf {shlex.quote(done.run)}{same}")
    return 0
