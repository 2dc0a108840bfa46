"""Other programs of the node, asked one question each, with a limit on their time."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from homelab.node.system import processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO, Any

# Folders of driver programs that are not in the PATH of a non-interactive shell: WSL2, NixOS, ROCm.
_OF_DRIVER = "nvidia-smi"  # the one that is asked again and again
_ELSEWHERE = ["/usr/lib/wsl/lib", "/run/current-system/sw/bin", "/opt/rocm/bin"]


def path_of(name: str) -> str | None:
    """The program that PATH finds, None where it finds none. (The standard library's own loads every compressor for it.)"""
    for folder in os.get_exec_path() + _ELSEWHERE:
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def detached(
    words: Sequence[str], folder: str, environment: Mapping[str, str], log: IO[bytes], errors: IO[bytes] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """A program that runs in `folder` in a session of its own, without input; its errors go to `log` too without a file of their own.

    Raises OSError, ValueError and subprocess.SubprocessError when it cannot be started.
    """
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=errors or log, start_new_session=True, cwd=folder, **options
    )


def answer_of(words: Sequence[str], timeout_s: float, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit status, output, errors) of a program. Raises TimeoutError, OSError.

    A program that hangs in the driver cannot be killed: it is left behind without waiting for it. While it is there, its name is not started again.
    """
    if os.path.basename(words[0]) == _OF_DRIVER and processes.hangs(_OF_DRIVER):
        raise TimeoutError(f"{words[0]} was asked before, and still hangs in the driver")
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        raise TimeoutError(f"{words[0]} did not answer within {timeout_s:.0f} s") from None
    return process.returncode, output, errors
