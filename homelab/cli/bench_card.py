"""`homelab bench card`: how fast one card trains, in five minutes and without a download, as a row that can be shared."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from homelab.controller.features.bench.card_run import MeasuredCardSpeed


def command(
    node: Annotated[
        str | None, typer.Argument(help="The node's name. Default: the only one.", show_default=False, autocompletion=completion.nodes)
    ] = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    method: Annotated[
        str,
        typer.Option(help="lora (16-bit weights) or qlora (4-bit weights; needs bitsandbytes).", autocompletion=completion.bench_methods),
    ] = "lora",
    card: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="The number of the card in nvidia-smi. Default: the first that trains.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where the row is written. Default: card-NAME-METHOD.json.", show_default=False
        ),
    ] = None,
    as_json: common.JsonOption = False,
) -> int:
    """Train a model of random weights on one card for a minute and write its speed as one anonymous row that you can share."""
    from homelab.controller.attempt import card_table
    from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.bench import card_run
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import store

    if method not in ("lora", "qlora"):
        raise InputError(
            f"{method!r} is no method that measures a card; allowed: lora, qlora",
            where="--method",
            hint=homelab("bench card --method lora"),
        )
    names = [entry.name for entry in common.load_cluster(cluster).nodes]
    if node is None and len(names) > 1:
        raise InputError(
            f"which node's card? {cluster} has {', '.join(names)}",
            where="the command line of homelab bench card",
            hint=homelab("bench card", names[0]),
        )
    loaded = common.load_cluster(cluster, node or names[0])
    common.checked_output(output or Path("card.json"))
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        found = card_run.measure(fleet, "qlora" if method == "qlora" else "lora", card, say)
    file = output or Path(f"card-{_stem(found.row.card)}-{method}.json")
    with store.best_effort_write(file):  # what was measured is told all the same
        store.write_text(file, card_table.written(found.row))
    code = EXIT_FAILED if file in store.UNWRITTEN else EXIT_DONE
    if as_json:
        common.print_json(
            {
                "row": found.row.model_dump(mode="json", exclude_none=True),
                "of_guess": found.of_guess,
                "file": str(file),
                "table": str(card_table.SHIPPED),
            }
        )
        return code
    for line in _lines(found):
        terminal.echo(line)
    if code:
        terminal.echo(f"the row: {card_table.written(found.row)}".rstrip())
        return code
    terminal.echo(f"wrote {file}: one row, without a name of a machine or a person")
    if found.of_guess is None:
        why = (
            "No plan uses the row of a CPU"
            if found.row.card.startswith("CPU")
            else "homelab/controller/base/data_sheets.py does not know this card yet, and no plan uses its row"
        )
        terminal.echo(f"{why}. Next: homelab launch RECIPE{common.same_options(cluster)} (its first steps measure this machine)")
        return 0
    table = shlex.quote(str(card_table.SHIPPED))
    terminal.echo(f"To send it, see CONTRIBUTING.md of the project. Next, for your own plans: cat {shlex.quote(str(file))} >> {table}")
    return 0


def _lines(found: MeasuredCardSpeed) -> list[str]:
    """The answer first."""
    from homelab.controller.base.units import gigabytes
    from homelab.controller.features.bench import card_recipe
    from homelab.controller.planning.machines import cards

    row = found.row
    peak = f", {gigabytes(row.peak_bytes)} GB at most" if row.peak_bytes else ""
    size = card_recipe.parameters(row)
    billions = f"{size / 1e9:.1f} billion" if size >= 1e9 else f"{size / 1e6:.0f} million"
    first = f"{cards.short(row.card)}: {row.tokens_per_s:.0f} tokens/s ({row.method} in {row.precision}, {billions} random weights, rows of {row.seq_len} tokens{peak})"
    return [first] if found.of_guess is None else [first, f"{found.of_guess:.2f} of the speed that its data sheet promises"]


def _stem(card: str) -> str:
    """`rtx-3090` of "NVIDIA GeForce RTX 3090"."""
    import re

    from homelab.controller.planning.machines import cards

    return re.sub(r"[^a-z0-9]+", "-", cards.short(card).lower()).strip("-") or "unknown"
