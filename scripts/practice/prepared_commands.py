"""`homelab` commands without the half second that Python takes to start: a parent that has imported the packages forks one after another.

Every command is a process with its own environment, folder and output, runs the package's `__main__`, and ends as Python
ends, up to the modules: see `_end`. `Desk.spawn` starts commands that get signals or begin at a terminal, and end whole.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from homelab.controller.remote import ship

REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_BYTES = 1 << 18
spent_s = 0.0  # CPU seconds of all commands so far
# Other people's packages. Of ours the whole controller, which looks at no environment while it is imported; the lab does.
IMPORTED = ("fabric", "paramiko", "rich.console", "rich.live", "rich.table", "typer.exceptions")


def run(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float, stdin: str = "", script: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python -m homelab ARGUMENTS`, or the installed `script` with them, to its end; `stdin` is on its standard input.

    Raises subprocess.TimeoutExpired, and then it has been killed.
    """
    request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "script": script}).encode()
    assert len(request) < _MOST_BYTES
    here, there = socket.socketpair()
    with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, here:
        into.write(stdin.encode())
        into.seek(0)
        with there:
            socket.send_fds(_parent(), [request], [into.fileno(), out.fileno(), err.fileno(), there.fileno()])

        def said() -> list[str]:
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8"))
            return texts

        with here.makefile("r") as answers:
            here.settimeout(60)
            pid = int(answers.readline())
            here.settimeout(timeout_s)
            try:
                code, cost_s = json.loads(answers.readline())
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(arguments), timeout_s, *said()) from None
        global spent_s
        spent_s += cost_s
        return subprocess.CompletedProcess(list(arguments), code, *said())


@functools.cache
def _parent() -> socket.socket:
    """Where requests for the parent go. It ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "scripts.practice.prepared_commands", str(there.fileno())], cwd=REPOSITORY, env=outside | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL, pass_fds=[there.fileno()],
    )  # fmt: skip
    there.close()

    def end() -> None:
        here.close()
        process.wait(20)

    atexit.register(end)
    return here


def _prepare() -> None:
    """What all commands begin with, once."""
    ours = pkgutil.walk_packages([str(REPOSITORY / "homelab/controller")], "homelab.controller.")
    for name in (*IMPORTED, *(module.name for module in ours)):
        importlib.import_module(name)
    # 0.1 s of each command that asks a node.
    ship.CODE.archive()
    # Each call makes all commands with their options anew: 0.06 s.
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(importlib.import_module("homelab.cli.command_list").app)
    # Else each command walks through all of it at its end, and copies the pages: 0.15 s.
    gc.collect()
    gc.freeze()


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Returns in every process that is to be a command, with its request, and in the parent when nobody asks any more: None."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            return None
        if os.fork() == 0:
            requests.close()
            return _become(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], into: int, out: int, err: int, answers: int) -> dict[str, Any]:
    """The command's own process; the one that came here waits for its end, and tells it."""
    pid = os.fork()
    if pid:
        os.write(answers, b"%d\n" % pid)
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(OSError):
            os.write(answers, json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode() + b"\n")
        os._exit(0)
    for descriptor, target in ((into, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, target)
    for descriptor in (into, out, err, answers):
        os.close(descriptor)
    return request


def _end(code: int) -> NoReturn:
    """Python's own end without its last part, which takes all modules apart: 0.06 s, for it copies what it shares with the parent.

    What comes before is the same: threads are waited for, what was registered runs, and what cannot be written is an exit code (120).
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _prepare()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv[1:] = asked["arguments"]
        sys.path[0] = asked["cwd"]
        try:
            if asked["script"]:
                runpy.run_path(asked["script"], run_name="__main__")
            else:
                runpy.run_module("homelab", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            if not isinstance(left.code, int):
                raise
            _end(left.code)
