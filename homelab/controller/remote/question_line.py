"""A process on a node that answers question after question (`homelab.node.question_loop`): no Python has to start for each of them."""

from __future__ import annotations

import json
import math
import time
from typing import BinaryIO

from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.session import Completed, Stream

# After a line that broke nobody knows whether the last question was heard. These may be asked again, but for ONCE: those are asked only on a line that has
# answered a moment ago.
VERBS = frozenset({
    "checkpoints", "claim", "describe", "energies", "facts", "free-port", "has-file", "manifest", "mark-stop", "poll", "release", "runs", "save", "start", "stop",
})  # fmt: skip

ONCE, MOMENT_S = frozenset({"start"}), 2.0


class QuestionLine:
    """One question at a time. After an exception it is of no use any more."""

    def __init__(self, stream: Stream, command: str) -> None:
        self.command = command
        self.answered_s = -math.inf  # monotonic
        self._stream = stream

    def ask(self, verb: str, request: bytes, into: BinaryIO, timeout_s: float) -> Completed:
        """The answer's bytes go `into`, as they come. Raises TimeoutError; OSError and ValueError where this is no line of ours, or it broke."""
        deadline = time.monotonic() + timeout_s
        self._stream.write(b'{"verb": %s, "request": %s}\n' % (json.dumps(verb).encode(), request.strip()))
        while line := self._stream.readline(max(0.0, deadline - time.monotonic())):
            if line[:1] == b"+":
                into.write(line[1:])
                continue
            if line[:1] != b"=":
                break
            end = decoded(line[1:], 10)
            if not isinstance(end, dict) or type(end.get("returncode")) is not int or not isinstance(end.get("stderr"), str):
                break
            self.answered_s = time.monotonic()
            return Completed(end["returncode"], b"", end["stderr"].encode())
        raise OSError("the line of questions broke")

    def close(self) -> None:
        """End the process."""
        self._stream.close()
