"""Other programs of the node, asked one question each, with a limit on their time."""

import contextlib
import os
import subprocess

# Where drivers put their programs without telling a shell that nobody sits at: WSL2, NixOS, ROCm.
_ELSEWHERE = ["/usr/lib/wsl/lib", "/run/current-system/sw/bin", "/opt/rocm/bin"]


def path_of(name):
    """The program that PATH finds, None where it finds none. (The standard library's own loads every compressor for it.)"""
    for folder in os.get_exec_path() + _ELSEWHERE:
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def answer_of(words, timeout_s, environment=None):
    """(exit status, output, errors) of a program. Raises TimeoutError, OSError.

    A program that hangs in the driver cannot even be killed: it is left behind, and nobody waits for it.
    """
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        raise TimeoutError("%s did not answer within %d s" % (words[0], timeout_s)) from None
    return process.returncode, output, errors
