"""Rows of the data as the model will read them: what is learned stands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from homelab.cli.clean_console import CleanConsole
from homelab.shared.protocol.row_forms import PREFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    from homelab.shared.protocol.worker_messages import FileSample

_LEARNED = "bold green"


def summary(data: Path, file: FileSample) -> str:
    """The answer in one line: how many rows of which form, and how long they are; or why they were not read."""
    if file.unread:
        return f"{data}: the rows were not looked at: {file.unread}"
    rows = f"{file.rows_read}{'' if file.whole else ' and more'} row{'' if file.rows_read == 1 else 's'}, read as {file.read_as}"
    if not file.tokens_sampled:
        return f"{data}: {rows}."
    learned = f"{file.loss_tokens / max(1, file.sum_tokens):.0%} of the tokens are learned"
    return f"{data}: {rows}; {file.median_tokens} tokens in the middle, the longest has {file.longest_tokens}; {learned}."


def show(file: FileSample) -> None:
    """Print the previews of a file, and what is learned in words for a terminal without colours."""
    from rich.text import Text

    console = CleanConsole(highlight=False)
    console.print(Text.assemble("As the model will read them; ", ("this is learned", _LEARNED), ", between \u25b8 and \u25c2:"))
    for row in file.previews:
        text = Text(f"{row.where}\n", style="dim")
        for number, piece in enumerate(row.texts):
            if piece.startswith("[other]") and file.form == PREFERENCE:
                text.append("\n")
            if piece:
                text.append(f"\u25b8{piece}\u25c2" if number % 2 else piece, style=_LEARNED if number % 2 else "default")
        console.print(text)
