"""One request (a JSON line on stdin), one answer (a JSON line on stdout).

A refusal is {"error": {"message", "kind", "where", "hint"}} and exit code 1; nothing here prints a traceback for a request that cannot be
answered. A verb that takes a stream reads its body from stdin after the request line (receive-...) or writes raw bytes to stdout (send-...).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING

from homelab.node import requests
from homelab.shared.protocol import message, secrecy
from homelab.shared.protocol.verb_table import VERBS

if TYPE_CHECKING:
    from typing import Any, BinaryIO, TextIO

    from homelab.shared.protocol.files import JsonObject

_OWN_PARTS = ("watch", "standby", "ranks")  # our own detached parts, no questions
_WRITERS = ("start", "receive-file", "receive-checkpoint")


class _Covered:
    """Standard output without the secrets of the runs that live here; bytes that are sent (`buffer`) are files, word for word."""

    def __init__(self, stream: TextIO) -> None:
        self.buffer = stream.buffer
        self._stream = stream
        self._words: list[str] | None = None

    def write(self, text: str) -> int:
        if self._words is None:  # at the first word: a start has kept its own by then
            from homelab.node.run import secret_files

            self._words = secret_files.words()
        self._stream.write(secrecy.hide(text, self._words))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def answer(verb: str) -> int:
    """Answer one verb on stdout; the exit code."""
    if verb in _OWN_PARTS:
        from homelab.node.run import rank_launcher, standby_holder, torchrun

        part: Any = {"watch": torchrun.watch, "standby": standby_holder.hold, "ranks": rank_launcher.main}[verb]
        return part(*sys.argv[2:]) or 0
    if verb == "questions":
        from homelab.node import question_loop

        return question_loop.main(answered)
    return answered(verb, None)


def answered(verb: str, line: bytes | None) -> int:
    """Answer one verb on stdout; the exit code. `line`: its request, None where it comes on stdin."""
    try:
        sys.stdout = _Covered(sys.stdout)
        line = sys.stdin.buffer.readline() if line is None else line
        request = json.loads(line) if line.strip() else {}
        for part in ("recipe_environment", "node_environment"):  # for everything that runs here; cluster.toml goes before the recipe
            os.environ.update(request.get(part) or {})
        result = call(verb, request, sys.stdin.buffer, sys.stdout.buffer)
        if result is not None:
            _print(result)
        return 0
    except (ValueError, KeyError, OSError) as error:
        _print({"error": refusal_of(error)})
    except Exception as error:  # noqa: BLE001 - our mistake: the controller shows it as an internal error, with this text
        text = f"{type(error).__name__}: {error}"
        _print({"error": {"message": text, "kind": "internal", "trace": traceback.format_exc(), "where": None, "hint": None}})
    return 1


def call(verb: str, request: JsonObject, stdin: BinaryIO, stdout: BinaryIO) -> Any:
    """The answer of a verb; None where it has written its answer itself. Raises ValueError for a verb that does not exist, and for a request that is none of its own."""
    if verb not in VERBS:
        raise ValueError(f"this agent does not know {verb!r}")
    declared = VERBS[verb]
    kind = declared.request_type()
    asked = requests.read(kind, request) if kind else request
    if "workdir" in request:
        from homelab.node import paths

        paths.keep_private(request["workdir"], make=verb in _WRITERS)
    answers = getattr(importlib.import_module(f"homelab.node.{declared.module}"), declared.function)
    return answers(asked, stdin if declared.stream == "stdin" else stdout) if declared.stream else answers(asked)


def refusal_of(error: Exception) -> JsonObject:
    """The three parts of an error and its kind, for the controller."""
    message = getattr(error, "message", str(error))
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    kind = "full" if getattr(error, "errno", None) == errno.ENOSPC else getattr(error, "kind", "refused")
    return {
        "message": message,
        "kind": kind,
        "trace": None,
        "where": getattr(error, "where", None) or None,
        "hint": getattr(error, "hint", None) or None,
    }


def _print(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer, default=message.fields) + "\n")
    sys.stdout.flush()
