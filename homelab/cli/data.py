"""`homelab data`: rows of a data file as the model will read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homelab.cli import common, terminal
from homelab.controller.base.errors import EXIT_DONE

_ROWS = 5


def command(
    data: Annotated[Path, typer.Argument(metavar="FILE", help="The data file.", show_default=False)],
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="The model whose chat template and tokens count: a folder of this machine.", show_default=False),
    ] = "",
    rows: Annotated[int, typer.Option("--rows", min=1, max=100, help="How many rows are shown.")] = _ROWS,
    as_json: common.JsonOption = False,
) -> int:
    """Show what the rows of a file are, how long they are, and which part of them is learned. Asks no node."""
    from homelab.cli import row_preview
    from homelab.controller.base.shell import file_word
    from homelab.controller.features.new import data_look
    from homelab.shared.protocol.message import as_json as as_json_value

    with common.progress(as_json) as say:
        say("looking into the data")
        sample = data_look.of_file(data, model, rows)
    file = sample.files["train"]
    if as_json:
        common.print_json(as_json_value(file))
        return EXIT_DONE
    terminal.echo(row_preview.summary(data, file))
    if not file.tokens_sampled and sample.tokenizer is None and not file.unread:
        terminal.echo(f"note: tokens are not counted: {data_look.why_not_counted(model)}")
    if sample.tokenizer is not None:
        terminal.echo(f"note: {sample.tokenizer.message}: {sample.tokenizer.hint}")
    if file.previews:
        terminal.echo()
        row_preview.show(file)
    terminal.echo(f"Next: homelab new {file_word(str(data))}")
    return EXIT_DONE
