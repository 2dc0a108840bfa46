"""The conversation of `homelab chat`: questions from the terminal (or lines of a pipe), answers as they are computed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from homelab.cli import terminal

if TYPE_CHECKING:
    from homelab.controller.features.chat.conversation import Message, NodeConversation

TITLES = {"base": "before: ", "trained": "after:  "}
_HELP = "/new begins another conversation, /quit ends (Ctrl-D, too), Ctrl-C stops an answer"


def hold(conversation: NodeConversation, models: list[str], max_new_tokens: int) -> None:
    """Until the questions end. Each model has the conversation with its own answers."""
    is_terminal = sys.stdin.isatty()
    for note in conversation.notes:
        terminal.echo(f"note: {note}", err=True)
    if is_terminal:
        terminal.echo(f"{conversation.run} on {conversation.node}. {_HELP}.", err=True)
    histories: dict[str, list[Message]] = {model: [] for model in models}
    for question in _questions(is_terminal):
        if question == "/new":
            histories = {model: [] for model in models}
        elif question.startswith("/"):
            terminal.echo(f"no such command: {question}. {_HELP}", err=True)
        else:
            for model, history in histories.items():
                _ask(conversation, model, history, question, max_new_tokens, title=TITLES[model] if len(models) > 1 else "")


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
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


def _ask(conversation: NodeConversation, model: str, history: list[Message], question: str, max_new_tokens: int, *, title: str) -> None:
    """Print the answer, and keep it in the history; a question without an answer is not kept."""
    from homelab.controller.base.errors import HomelabError, UnreachableError

    history.append({"role": "user", "content": question})
    pieces: list[str] = []
    terminal.piece(title)
    try:
        for piece in conversation.answer(history, model=model, max_new_tokens=max_new_tokens):
            pieces.append(piece)
            terminal.piece(piece)
    except KeyboardInterrupt:
        conversation.stop()
        terminal.piece(" ...")
    except UnreachableError:
        raise
    except HomelabError as error:
        history.pop()
        terminal.echo()
        terminal.three_parts("error", error.message, error.where, error.hint)
        return
    terminal.echo()
    history.append({"role": "assistant", "content": "".join(pieces).strip()})
