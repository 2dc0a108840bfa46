"""The conversation of `homelab chat`: questions from the terminal (or lines of a pipe), answers as they are computed."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len

from homelab.cli import terminal

if TYPE_CHECKING:
    from homelab.controller.features.chat.conversation import NodeConversation
    from homelab.controller.features.chat.dialogue import Dialogue

TITLES = {"base": "before: ", "trained": "after:  "}
_HELP = "/new begins another conversation, /bye ends (Ctrl-D, too), Ctrl-C stops an answer"
_ENDS = ("/bye", "/quit", "/exit")


class WrappedWords:
    """Words as they come, which break between words at so many columns. None: they are passed on as they come.

    The last word is held until it is whole, because a token is often a part of a word.
    """

    def __init__(self, write: Callable[[str], None], columns: int | None) -> None:
        self._write, self._columns = write, columns
        self._column, self._gap, self._word = 0, "", ""

    def add(self, text: str) -> None:
        """Show all whole words so far."""
        if self._columns is None:
            self._write(text)
            return
        for part in re.split(r"(\s)", text):
            if not part.isspace():
                self._word += part
                continue
            self._flush()
            if part == "\n":
                self._write("\n")
                self._column, self._gap = 0, ""
            else:
                self._gap += "    " if part == "\t" else part

    def end(self) -> None:
        """Show the rest, and end the line."""
        self._flush()
        self._write("\n")

    def _flush(self) -> None:
        assert self._columns is not None or not self._word
        if not self._word:
            return
        if self._column and self._column + cell_len(self._gap + self._word) > (self._columns or 0):
            self._write("\n")
            self._column, self._gap = 0, ""
        self._write(self._gap + self._word)
        self._column += cell_len(self._gap + self._word)
        self._gap, self._word = "", ""


def hold(conversation: NodeConversation, models: list[str], max_new_tokens: int) -> None:
    """Until the questions end."""
    from homelab.controller.features.chat.dialogue import Dialogue

    is_terminal = sys.stdin.isatty()
    for note in conversation.notes:
        terminal.echo(f"note: {note}", err=True)
    if is_terminal:
        terminal.echo(f"{conversation.run} on {conversation.node}. {_HELP}.", err=True)
    dialogue = Dialogue(conversation, models)
    for question in _questions(is_terminal):
        if question == "/new":
            dialogue.clear()
        elif question == "/help":
            terminal.echo(_HELP, err=True)
        elif question.startswith("/"):
            terminal.echo(f"no such command: {question}. {_HELP}", err=True)
        else:
            for model in models:
                _ask(dialogue, model, question, max_new_tokens, title=TITLES[model] if len(models) > 1 else "")


def _questions(is_terminal: bool) -> Iterator[str]:
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # the arrow keys
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                terminal.echo("")
            return
        if line in _ENDS:
            return
        if line:
            yield line


def _ask(dialogue: Dialogue, model: str, question: str, max_new_tokens: int, *, title: str) -> None:
    """Print the answer."""
    from homelab.controller.base.errors import HomelabError, UnreachableError

    shown = WrappedWords(terminal.piece, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    shown.add(title)
    try:
        dialogue.ask(model, question, max_new_tokens, shown.add)
    except UnreachableError:
        raise
    except HomelabError as error:
        terminal.echo()
        terminal.three_parts("error", error.message, error.where, error.hint)
        return
    shown.end()
