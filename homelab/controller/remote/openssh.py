"""OpenSSH itself as the transport: one control connection per node (ssh_config(5), ControlMaster), and one `ssh` process per command over it.

It serves whatever paramiko lacks: proxies and chains of hops, other agents, certificates, hardware keys, aliases of host keys, ... Nothing of
it outlives this process: the connection ends with its standard input, and a proxy with the connection.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from homelab.controller.remote import own_programs

# Agents ask their owner now and then (1Password, a key with a button); the server's greeting has a limit of its own, ConnectTimeout.
LOGIN_LIMIT_S = 45.0
_POLL_S = 0.01
_LONGEST_SOCKET = 80  # of the 104 bytes that macOS has for a path; OpenSSH adds 17 while it makes the socket (mux.c)
_LOST = 255  # OpenSSH's own exit code for a connection that broke, and for a command that was ended by a signal
_ENDING_S = 0.5
# Only a dead connection lets a client connect by itself: with no file and no way it cannot.
_CLIENT = (
    "-F",
    os.devnull,
    "-o",
    "BatchMode=yes",
    "-o",
    "ProxyCommand=exit 255",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "LogLevel=ERROR",
    "-T",
)
# Written by the login shell of any account, and it ends with our end of the pipe.
_STAY = "exec cat > /dev/null"


class LoginRefusedError(Exception):
    """OpenSSH did not come as far as a session; its last words. `is_hanging`: it was ended because nothing happened any more."""

    def __init__(self, words: str, *, is_hanging: bool = False) -> None:
        super().__init__(words)
        self.words, self.is_hanging = words, is_hanging


class OpenSshTransport:
    """A control connection. `words`: `ssh` with its options (`homelab.controller.remote.ssh_route`)."""

    def __init__(self, words: Sequence[str], host: str, limit_s: float) -> None:
        """Connect. Raises RefusedError."""
        self._folder = _socket_folder()
        self._socket, self.host = str(self._folder / "c"), host
        master = [
            *words,
            "-o",
            "ControlMaster=yes",
            "-o",
            f"ControlPath={self._socket.replace('%', '%%')}",
            "-o",
            "ControlPersist=no",
            "-T",
            "--",
            host,
            _STAY,
        ]
        with (self._folder / "errors").open("wb") as errors:
            # In a session of its own: Ctrl-C is ours, and its end is the end of every proxy.
            self._process = own_programs.start(
                [_bytes(word) for word in master], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        try:
            self._wait(limit_s + LOGIN_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not os.path.exists(self._socket):
            if self._process.poll() is not None:
                raise LoginRefusedError(self._said())
            if time.monotonic() > deadline:
                raise LoginRefusedError(self._said(), is_hanging=True)
            time.sleep(_POLL_S)

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / "errors").read_text(encoding="utf-8", errors="replace")[-10_000:]
        return ""

    def is_active(self) -> bool:
        """Whether the connection stands."""
        return self._process.poll() is None

    def open_session(self, timeout: float) -> OpenSshChannel:
        """A channel for one command. Raises OSError where the connection is gone."""
        if not self.is_active():
            raise OSError(f"OpenSSH ended: {(self._said().strip().splitlines() or ['it printed nothing'])[-1]}")
        return OpenSshChannel(self)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """An `ssh` process over the connection."""
        command = [_bytes(word) for word in ("ssh", *_CLIENT, "-S", self._socket.replace("%", "%%"), *words)]
        return own_programs.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def round_trip_s(self, limit_s: float) -> float:
        """Seconds of a question that the server answers without a shell: a connection to its own port 1, which it refuses. Raises OSError.

        The start of the `ssh` process is taken off; it is measured with a question that only the control connection answers.
        """
        started = time.perf_counter()
        self._call(limit_s, "-O", "check", "--", self.host)
        asked = time.perf_counter()
        self._call(limit_s, "-W", "127.0.0.1:1", "--", self.host)
        if not self.is_active():
            raise OSError("it stopped answering")
        ended = time.perf_counter()
        return max(ended - asked - (asked - started), 0.0)

    def _call(self, limit_s: float, *words: str) -> None:
        process = self.start(*words)
        try:
            process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            self.close()
            raise OSError("it stopped answering") from error
        finally:
            if process.returncode is None:
                own_programs.end_group(process)

    def close(self) -> None:
        """End the connection, its proxies and its socket. Idempotent."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        if self._folder.exists():
            own_programs.end_group(self._process)
            shutil.rmtree(self._folder, ignore_errors=True)


class OpenSshChannel:
    """One command over a control connection, with what a session needs of paramiko.Channel."""

    def __init__(self, transport: OpenSshTransport) -> None:
        self.transport = transport
        self.status_event = self
        self._process: subprocess.Popen[bytes] | None = None
        self._timeout_s: float | None = None
        self._closing = threading.Lock()

    def exec_command(self, command: str) -> None:
        """Start it. Raises OSError."""
        self._process = self.transport.start("--", self.transport.host, command)

    def settimeout(self, timeout_s: float | None) -> None:
        """How long `recv` waits."""
        self._timeout_s = timeout_s

    def recv(self, size: int) -> bytes:
        """The next bytes of stdout; b"" at its end. Raises TimeoutError."""
        process = self._started()
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(self._timeout_s):
                    raise TimeoutError
                return os.read(process.stdout.fileno(), size)
            except ValueError as error:  # closed by another thread
                raise OSError("the channel was closed") from error

    def recv_stderr(self, size: int) -> bytes:
        """The next bytes of stderr; b"" at its end."""
        process = self._started()
        assert process.stderr is not None
        try:
            return process.stderr.read(size) or b""
        except ValueError as error:
            raise OSError("the channel was closed") from error

    def sendall(self, block: bytes) -> None:
        """Write to stdin. Raises OSError when the command has ended."""
        process = self._started()
        assert process.stdin is not None
        view = memoryview(block)
        try:
            while view:
                view = view[process.stdin.write(view) or 0 :]
        except ValueError as error:
            raise OSError("the channel was closed") from error

    def shutdown_write(self) -> None:
        """Close stdin."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether the command ends within so long (`status_event.wait` of a paramiko channel)."""
        try:
            self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def recv_exit_status(self) -> int:
        """The exit code; -1 where a signal ended the command, or the connection broke. OpenSSH has one number for both, and for an `exit 255`."""
        returncode = self._started().wait()
        if returncode == _LOST or returncode < 0:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the connection ends a moment after its clients
                self.transport._process.wait(_ENDING_S)
            return -1
        return returncode

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._closing:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                    if stream is not None:
                        with contextlib.suppress(OSError):
                            stream.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise OSError("no command runs in this channel")
        return self._process


def _socket_folder() -> Path:
    """A folder of ours alone, short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="homelab-"))
    if len(os.fsencode(folder)) <= _LONGEST_SOCKET:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="homelab-", dir="/tmp"))


def _bytes(word: str) -> bytes:
    return word.encode("utf-8", "surrogateescape")
