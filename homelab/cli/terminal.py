"""The one place of the commands that prints: whatever passes here is made harmless to a terminal, whoever said it.

A node, a model, a log or a file may have said it. Nobody else prints: tests/test_terminal.py is the rule.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from homelab.controller.base.sanitize import plain_json, plain_piece

if TYPE_CHECKING:
    import subprocess

_BOLD, _RED, _DIM, _END = "\033[1m", "\033[31m", "\033[2m", "\033[0m"
_LOOK_S = 0.1


def echo(text: str = "", *, err: bool = False) -> None:
    """These lines, at once. Raises OSError where stdout takes nothing."""
    piece(f"{text}\n", err=err)


def piece(text: str, *, err: bool = False) -> None:
    """A part of a line, at once; a line of it that begins with spaces keeps them."""
    stream = sys.stderr if err else sys.stdout
    stream.write(plain_piece(text))
    stream.flush()


def relay(process: subprocess.Popen[bytes]) -> None:
    """What a program that was started says on its stdout, at once, until it has ended: a question waits for its answer in the middle of a line.

    `ssh -t` has put the terminal into raw mode, where a line feed alone does not go to the beginning of a line.
    """
    import select

    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    end, again = ("\r\n", "\r") if sys.stdout.isatty() else ("\n", "\n")
    while True:
        if not select.select([process.stdout], [], [], _LOOK_S)[0]:
            if process.poll() is not None:  # what it has left behind may hold its stdout open
                return
            continue
        block = os.read(process.stdout.fileno(), 1 << 16)
        parts = re.split("(\r*\n|\r)", decoder.decode(block, final=not block))
        sys.stdout.write(
            "".join(plain_piece(part) if number % 2 == 0 else end if "\n" in part else again for number, part in enumerate(parts))
        )
        sys.stdout.flush()
        if not block:
            return


def document(value: Any) -> None:
    """One JSON document on stdout: a program reads each text as it was, a terminal obeys none of them."""
    sys.stdout.write(plain_json(json.dumps(value, indent=1, ensure_ascii=False)) + "\n")


def three_parts(label: str, message: str, where: str, hint: str) -> None:
    """What was seen, where, and the fix, on stderr; `label` ("error", "warning") stands before the first."""
    bold, red, dim, end = (_BOLD, _RED, _DIM, _END) if sys.stderr.isatty() else ("", "", "", "")
    # A line of a quoted message that begins like a line of ours is indented.
    message, where, hint = (re.sub(r"\n(?=(?:error|warning|where|fix):)", "\n  ", plain_piece(text)) for text in (message, where, hint))
    width = max(len(label), len("where")) + 1
    sys.stderr.write(f"{red}{bold}{label + ':':{width}}{end} {message}\n")
    for name, text in (("where:", where), ("fix:", hint)):
        if text:
            sys.stderr.write(f"{dim}{name:{width}}{end} {text}\n")
    sys.stderr.flush()


def confirm(question: str, *, default: bool = False, err: bool = False) -> bool:
    """Whether the person says yes. Raises typer.Abort where nobody answers."""
    import typer

    return typer.confirm(plain_piece(question), default=default, err=err)


def prompt(question: str, default: str | None = None) -> str:
    """What the person answers, on stderr; an empty default is not shown. Raises typer.Abort where nobody answers."""
    import typer

    shown = default if default is None else plain_piece(default)
    return str(typer.prompt(plain_piece(question), default=shown, show_default=bool(shown), err=True))
