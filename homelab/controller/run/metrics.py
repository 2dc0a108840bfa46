"""metrics.jsonl on this machine: what all ranks have measured, each line once, though a supervisor and several `status` write it.

What a later attempt has done again replaces what an earlier one did: of every step one line per rank is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from homelab.controller.facts.reading import is_readable
from homelab.controller.run import store
from homelab.controller.run.metric_keys import Key, Line, key, undone
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import files
from homelab.shared.protocol.rank_messages import Metric


def is_line(line: Mapping[str, Any]) -> bool:
    """False for what a damaged file holds: the nodes give it again."""
    return is_readable(Metric, line) and all(type(line.get(name, 0)) is int for name in ("attempt", "rank", "step"))


class Gathered:
    """The file, and what of it is known here. Lines that are none are left out."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._lines: dict[Key, Line] = {}
        self._read_to: tuple[int, int] = (0, 0)  # inode, bytes
        self._has_doubles = False  # an older homelab, two of which wrote at once, has left them
        self._settled: dict[int, int] = {}  # the attempts of which it is known what they have replaced
        self._read()

    @property
    def lines(self) -> list[Line]:
        """Every line once, in the order in which they came."""
        return list(self._lines.values())

    def refresh(self) -> None:
        """Take in what other processes have written since."""
        self._read()

    def add(self, new: Sequence[Line], resumed: Mapping[int, int]) -> None:
        """Keep what is not known yet, and drop what was done again. A disk that refuses is told (`store.best_effort_write`), and no error."""
        new = [line for line in new if is_line(line)]
        if not self._has_doubles and self._settled == resumed and all(key(line) in self._lines for line in new):
            return
        with _alone(self._paths):
            self._read()  # another process may have written meanwhile
            fresh = list({key(line): line for line in new if key(line) not in self._lines}.values())
            self._lines |= {key(line): line for line in fresh}
            removed = undone(self.lines, resumed)
            is_clean = not self._has_doubles and removed <= {key(line) for line in fresh}
            self._lines = {line_key: line for line_key, line in self._lines.items() if line_key not in removed}
            if is_clean:
                store.append_lines(self._paths.metrics_jsonl, [line for line in fresh if key(line) not in removed])
            else:
                with store.best_effort_write(self._paths.metrics_jsonl):
                    text = "".join(json.dumps(line, sort_keys=True, ensure_ascii=False) + "\n" for line in self.lines)
                    store.write_text(self._paths.metrics_jsonl, text)
                    self._has_doubles = False
            self._read_to = self._place()
            self._settled = dict(resumed)

    def _read(self) -> None:
        """What is in the file since it was read last: all of it, where it is another file."""
        inode, size_bytes = self._place()
        start = self._read_to[1] if inode == self._read_to[0] and size_bytes >= self._read_to[1] else 0
        if not start:
            self._lines, self._has_doubles = {}, False
        text = _bytes(self._paths, start, size_bytes)
        text = text[: text.rfind(b"\n") + 1]  # another process may be in the middle of a line
        for line in filter(is_line, files.json_objects(text.decode("utf-8", "replace").split("\n"))):
            self._has_doubles = self._has_doubles or key(line) in self._lines
            self._lines[key(line)] = line
        self._read_to = (inode, start + len(text))

    def _place(self) -> tuple[int, int]:
        try:
            state = os.stat(self._paths.metrics_jsonl)
        except OSError:
            return (0, 0)
        return (state.st_ino, state.st_size)


def _bytes(paths: RunPaths, start: int, end: int) -> bytes:
    if not os.path.isfile(paths.metrics_jsonl):  # a pipe would be waited for
        return b""
    try:
        with open(paths.metrics_jsonl, "rb") as stream:
            stream.seek(start)
            return stream.read(max(0, end - start))
    except OSError:
        return b""


@contextlib.contextmanager
def _alone(paths: RunPaths) -> Iterator[None]:
    """Keep other writers of the file out. Where the lock cannot be had (a disk that is read-only), what follows says why."""
    try:
        descriptor = os.open(paths.root / ".metrics.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
