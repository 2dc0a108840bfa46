"""Argument lists as shell text: the only place that quotes words for a shell. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence


def quote_path(path: str) -> str:
    """A path as one shell word. A leading `~/` stays the remote user's home; nothing else is expanded."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)


def file_word(path: str) -> str:
    """A file of this machine as one shell word that no command takes for an option: `./-rf.toml`."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def quote_words(words: Iterable[str]) -> str:
    """An argument list as shell text."""
    return " ".join(shlex.quote(word) for word in words)


def quote_torchrun(words: Sequence[str]) -> str:
    """A torchrun command as text for a shell of the node.

    A `~/` of the program and of torchrun's own folder, which a plan without machines has, is the home of whoever types it. The other words
    are the person's, and arrive as they are.
    """
    text = " ".join((quote_path(words[0]), *(shlex.quote(word) for word in words[1:])))
    log = next((word for word in words if word.startswith("--log-dir=~/")), "")
    return text.replace(shlex.quote(log), "--log-dir=" + quote_path(log.removeprefix("--log-dir=")), 1) if log else text


def in_sh(script: str) -> str:
    """Run `script` under /bin/sh whatever the login shell is (fish and csh read other languages).

    Inside of single quotes fish reads backslashes, csh reads `!` and refuses the end of a line. A script with one of these is
    written with octal escapes (`\\0NNN`, which printf's %b takes back): they mean the same to all shells.
    """
    if not set(script) & set("\\!\n"):
        return f"exec /bin/sh -c {shlex.quote(script)}"
    written = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter == " ") else "".join(f"\\0{byte:03o}" for byte in letter.encode())
        for letter in script
    )
    return f"""exec /bin/sh -c 'eval "$(printf %b "$0")"' '{written}'"""
