"""Processes that a test starts so that something finds them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def living(*words: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that lives until the block ends, with `environment` beside this process's own and `words` in its command line.

    It has answered before the block begins: a process in execve has no environment and no command line for a moment, and `Popen`
    returns in that moment (242 of 300 reads at once found neither, measured).
    """
    program = [sys.executable, "-c", "print(flush=True); input()", *words]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
