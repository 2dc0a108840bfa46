"""The worker's programs that make something of a trained model: followed line by line, ended with the one who asked."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol.errors import EXIT_INPUT, parts_of

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from homelab.shared.protocol.files import JsonObject

PROGRAMS = ("model_export", "merge", "gguf")
_BEAT_S = 5.0
_END_S = 5.0


def make(request: JsonObject) -> None:
    """Run a program of the worker (`request`: workdir, run, program, and what it reads) until it ends or stdin closes.

    Prints its JSON lines, {"say": ""} every 5 s, and at the end {"made": ...} or {"error": {"message", "where", "hint", "kind"}}.
    """
    if request["program"] not in PROGRAMS:
        raise ValueError(f"not a program for results: {request['program']!r}")
    body = dict(request, run_dir=paths.run_dir(request["workdir"], request["run"]))
    environment = dict(os.environ, HF_HUB_DISABLE_PROGRESS_BARS="1", CUDA_VISIBLE_DEVICES="")
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", f"homelab.worker.tools.{request['program']}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(body).encode())
                child.stdin.close()
            if _follow(child) and child.wait() != 0:
                said.seek(max(0, said.tell() - (64 << 10)))
                _say({"error": _error(child.returncode, said.read().decode("utf-8", "replace"))})
        except OSError:  # nobody reads any more
            pass
        finally:
            _end(child)


def _follow(child: subprocess.Popen[bytes]) -> bool:
    """Pass its lines on; whether it closed its output by itself. What libraries print between is no message."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read(stream: BinaryIO) -> None:
        for line in stream:
            lines.put(line)
        lines.put(b"")

    def listen() -> None:
        while sys.stdin.buffer.read(1):
            pass
        lines.put(None)

    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_BEAT_S)
        except queue.Empty:
            _say({"say": ""})
            continue
        if not line:
            return line is not None
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and message.keys() & {"say", "made"}:
                _say(message)


def _error(code: int, text: str) -> JsonObject:
    parts: dict[str, Any] = dict(parts_of(text))
    if not parts:
        last = ([line for line in text.splitlines() if line.strip()] or [f"exit code {code}"])[-1]
        killed = code == -signal.SIGKILL
        parts = {
            "message": "it was killed (out of memory?)" if killed else f"the program failed: {last[:500]}",
            "where": "",
            "hint": "free -h" if killed else "",
        }
    return {**parts, "kind": "input" if code == EXIT_INPUT else "failed"}


def _say(message: JsonObject) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left: it gets a moment to remove what it has half written."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):  # its own children
        os.killpg(child.pid, signal.SIGKILL)
