"""TensorBoard itself, a process of its own that serves one folder on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain

_START_S = 60.0  # its imports take some seconds, on a machine that is busy many
_END_S = 5.0
_ADDRESS = re.compile(r"\bat (http://\S+)")


class TensorBoardServer:
    """From its start until `close`. `port` 0: a free one. Raises HomelabError where it does not come up."""

    def __init__(self, folder: Path, port: int) -> None:
        words = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
        # A session of its own: it ends with us, and a Ctrl-C is ours alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tensorboard.main", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.address = ""
        self._said: deque[str] = deque(maxlen=20)
        self._knows = threading.Event()
        threading.Thread(target=self._read, daemon=True, name="tensorboard").start()
        try:
            self._knows.wait(_START_S)
            if not self.address:
                raise self._not_started(port)
        except BaseException:
            self.close()
            raise

    def refuse_ended(self) -> None:
        """Raises HomelabError where it has ended by itself."""
        if self._process.poll() is not None:
            raise HomelabError(
                f"TensorBoard has ended by itself: {self._last()}",
                where=f"exit code {self._process.returncode}",
                hint=homelab("tensorboard RUN"),
            )

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.strip())
            match = _ADDRESS.search(line)
            if match:
                self.address = match[1]
                self._knows.set()
        self._knows.set()

    def _not_started(self, port: int) -> HomelabError:
        where = f"127.0.0.1:{port}" if port else "127.0.0.1"
        return HomelabError(f"TensorBoard did not start: {self._last()}", where=where, hint=homelab("tensorboard --port 0 RUN"))

    def _last(self) -> str:
        return plain(next((line for line in reversed(self._said) if line), "it said nothing"))
