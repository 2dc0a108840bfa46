"""`homelab tensorboard`: event files that follow the run, and TensorBoard beside them, a process of its own that serves one folder on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain
from homelab.controller.base.say import Say
from homelab.controller.features.track import event_files, forwarder_lock
from homelab.controller.features.track.event_files import EventFiles
from homelab.controller.features.track.metrics_source import KnownMetrics, MetricsSource
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths

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
                where = f"127.0.0.1:{port}" if port else "127.0.0.1"
                raise HomelabError(f"TensorBoard did not start: {self._last()}", where=where, hint=homelab("tensorboard --port 0 RUN"))
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

    def _last(self) -> str:
        return plain(next((line for line in reversed(self._said) if line), "it said nothing"))


def show(fleet: Fleet, paths: RunPaths, *, port: int, say: Say, serving: Callable[[str, KnownMetrics], None]) -> None:
    """Until Ctrl-C. `serving` is told the address and the first look, once. Raises HomelabError; the run is never touched.

    A forwarder that writes the event files already goes on doing so.
    """
    package.require("tensorboard", event_files.REQUIREMENT)
    source = MetricsSource(fleet, paths)
    with ExitStack() as stack:
        files = EventFiles(paths.event_files) if stack.enter_context(forwarder_lock.held(paths, "tensorboard")) else None
        if files is not None:
            stack.callback(files.close)
        say("gathering the run's metrics")
        look = _look(source, files)
        say("starting TensorBoard")
        server = TensorBoardServer(paths.event_files.parent, port)
        stack.callback(server.close)
        serving(server.address, look)
        trouble = ""
        with suppress(KeyboardInterrupt):
            while True:
                server.refuse_ended()
                time.sleep(look.next_s)
                if not look.is_over:
                    look = _look(source, files)
                    if look.trouble != trouble and look.trouble:
                        say(f"the curves get no new points: {look.trouble}")
                    trouble = look.trouble


def _look(source: MetricsSource, files: EventFiles | None) -> KnownMetrics:
    look = source.look()
    if files is not None:
        with store.disk_errors_as_hints(files.folder):
            files.bring(look.points)
    return look
