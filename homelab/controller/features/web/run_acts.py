"""What pages do with runs: our own command, as a process of its own. It goes on if the page is closed, and ends with the server."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from typing import IO

from homelab.controller.base.errors import BusyError, HomelabError
from homelab.controller.base.hint import Command, Hint, Options, homelab
from homelab.controller.base.sanitize import plain, shortened
from homelab.controller.features.web import act_words
from homelab.controller.features.web.act_words import Act
from homelab.controller.features.web.event_stream import Event
from homelab.controller.run import hub_token

MOST_LINES, MOST_LINE = 1000, 500  # that a page is told
_MOST_KEPT = 200  # of the last ones, for the error
_BLOCK = 1 << 16
_LOOK_S = 0.1
_END_S = 3.5  # a command ends by itself 4.5 s after SIGTERM at the latest (`homelab.controller.run.signals`)


class RunAct:
    """One command; its events are `began`, a `line` each, and `ended`.

    What it says goes into a file that has no name, so that it never waits for a reader, and goes on without one.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `watch` closes it
        self._at, self._rest, self._count = 0, b"", 0
        self._last: deque[str] = deque(maxlen=_MOST_KEPT)
        self._answer: list[str] = []
        # A path may hold letters that this locale has not (LC_ALL=C): as bytes, and for a Python that reads them so.
        words = [word.encode("utf-8", "surrogateescape") for word in [sys.executable, "-P", "-m", *shlex.split(command)]]
        with hub_token.lent({**os.environ, "PYTHONUTF8": "1"}) as (environment, descriptors):
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, start_new_session=True, env=environment, pass_fds=descriptors,
            )  # fmt: skip
        self.events.put_nowait({"began": str(command)})

    async def watch(self) -> None:
        """Tell what it says, until its end."""
        with self._said:
            while self.process.poll() is None:
                self._read()
                await asyncio.sleep(_LOOK_S)
            self._read()
            if self._rest:
                self._tell(self._rest)
        if self._count > MOST_LINES:
            self.events.put_nowait({"line": f"… {self._count - MOST_LINES} more lines"})
        self.events.put_nowait({"ended": act_words.ended(self.process.returncode, [*self._answer, *self._last])})

    def _read(self) -> None:
        while block := os.pread(self._said.fileno(), _BLOCK, self._at):  # not `read`: the command writes where this file stands
            self._at += len(block)
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                self._tell(line)
            self._rest = self._rest[-_BLOCK:]

    def _tell(self, said: bytes) -> None:
        line = shortened(plain(said.decode("utf-8", "replace")), MOST_LINE)
        self._count += 1
        self._last.append(line)
        if not self._answer and act_words.is_answer(line):
            self._answer.append(line)
        if self._count <= MOST_LINES:
            self.events.put_nowait({"line": line})


class RunActs:
    """Those of one server, in its event loop. `ended` is told the name of the run. `does_act`: False where others can hear the token of the pages."""

    def __init__(self, options: Options, ended: Callable[[str], None], *, does_act: bool) -> None:
        self._options, self._ended, self.does_act = options, ended, does_act
        self._under_way: dict[str, RunAct] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.cut: list[Command] = []

    def begin(self, run: str, act: Act) -> RunAct:
        """Raises BusyError where one is under way for this run, or the server ends; HomelabError where its program does not start."""
        command = homelab(act, run).with_options(self._options)
        look = homelab("status", run).with_options(self._options)
        if self._is_closing:
            raise BusyError("homelab web is ending", where=run, hint=Hint("in a terminal: {}", command))
        if run in self._under_way:
            other = self._under_way[run]
            hint = Hint("wait for its end; the first sentence of the page says what has become of it, and so does {}", look)
            raise BusyError(f"a page has begun {other.command}, and it is not over", where=f"{run}, process {other.process.pid}", hint=hint)
        try:
            begun = RunAct(command)
        except OSError as error:
            raise HomelabError(
                f"the command does not start: {error}", where=sys.executable, hint=Hint("in a terminal: {}", command)
            ) from error
        self._under_way[run] = begun
        self._tasks.add(asyncio.create_task(self._watch(run, begun)))
        return begun

    async def _watch(self, run: str, act: RunAct) -> None:
        try:
            await act.watch()
        finally:
            del self._under_way[run]
            self._ended(run)
            act.events.put_nowait(None)

    async def close(self) -> None:
        """End them as `kill` ends the command, and let none begin; `cut` names them."""
        self._is_closing = True
        for act in self._under_way.values():
            self.cut.append(act.command)
            act.process.terminate()
        if tasks := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(tasks, timeout=_END_S)
