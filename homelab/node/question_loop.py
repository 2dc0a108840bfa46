"""`python -m homelab.node questions`: answers one question after the other over one channel, each in a child of its own.

A Python takes 30 to 100 ms to start, and a recovery asks each node ten times. A child of this process begins with the modules that are here, and
nothing that it changes (variables, caches, its output) reaches the next one.

A question is a line {"verb", "request"}. Its answer comes in lines that begin with "+", each a part of what the verb prints; a line that begins
with "=" ends it: {"returncode", "stderr"}.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import traceback
from typing import TYPE_CHECKING

from homelab.shared.protocol.verb_table import VERBS

if TYPE_CHECKING:
    from collections.abc import Callable

    from homelab.shared.protocol.files import JsonObject

_PART_BYTES = 1 << 20  # the controller takes no line of more than 4 MiB
_ERRORS_KEPT_BYTES = 1 << 16


def main(answered: Callable[[str, bytes], int]) -> int:
    """Until the channel is closed. `answered`: prints the answer of a verb to a request; its exit code."""
    out = sys.stdout.buffer
    while line := sys.stdin.buffer.readline():
        said = json.loads(line)
        if said["verb"] in VERBS:  # here, so that the next child has it
            importlib.import_module(f"homelab.node.{VERBS[said['verb']].module}")
        output, returncode, errors = _answer(said, answered)
        for begin in range(0, len(output), _PART_BYTES):
            out.write(b"+" + output[begin : begin + _PART_BYTES].replace(b"\n", b"") + b"\n")
        end = {"returncode": returncode, "stderr": errors.decode("utf-8", "replace")}
        out.write(b"=" + json.dumps(end).encode() + b"\n")
        out.flush()
    return 0


def _answer(said: JsonObject, answered: Callable[[str, bytes], int]) -> tuple[bytes, int, bytes]:
    """(what the verb printed, its exit code or the negative number of a signal, the end of its errors)"""
    (output, child_out), (errors, child_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (child_out, 1), (child_err, 2)):
                os.dup2(descriptor, number)
            code = answered(said["verb"], json.dumps(said["request"]).encode())
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - this is a copy of the parent: nothing may go on in it
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(child_out)
    os.close(child_err)
    kept = _read(output, errors)
    _, status = os.waitpid(pid, 0)
    return bytes(kept[output]), -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), bytes(kept[errors])


def _read(output: int, errors: int) -> dict[int, bytearray]:
    """Both to their ends; of the errors the last part."""
    kept = {output: bytearray(), errors: bytearray()}
    open_ones = set(kept)
    while open_ones:
        for descriptor in select.select(list(open_ones), [], [])[0]:
            block = os.read(descriptor, 1 << 16)
            kept[descriptor] += block
            if not block:
                open_ones.discard(descriptor)
                os.close(descriptor)
        del kept[errors][:-_ERRORS_KEPT_BYTES]
    return kept
