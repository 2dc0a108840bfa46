"""metrics.jsonl on this machine: what all ranks have measured, each line once, though a supervisor and several `status` write it.

What a later attempt has done again replaces what an earlier one did: of every step one line per rank is left. A run may have millions of
lines: they are in the file alone. Who wants to know something of them takes them one by one, as they come.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from pydantic import ValidationError

from homelab.controller.base import secrets
from homelab.controller.facts.reading import read
from homelab.controller.run import kept_lock, store
from homelab.controller.run.followed_file import FollowedFile
from homelab.controller.run.metric_keys import KnownKeys, Line, key
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.undone_lines import Undone
from homelab.shared.protocol import files, lock
from homelab.shared.protocol.rank_messages import Metric

LOCK_S = 2.0  # a writer has it for an instant, and a supervisor that waits looks at no node meanwhile


class Taker(Protocol):
    """Who is given the lines."""

    def restart(self) -> None:
        """Forget all: lines that were given are gone, and those that are left come again."""

    def take(self, line: Line, metric: Metric) -> None:
        """One line more, in the order of the file: as it is, and read."""


class Gathered:
    """The file, and the keys of what is known of it here. Lines that are none are left out."""

    def __init__(self, paths: RunPaths, *takers: Taker) -> None:
        self._paths, self._takers = paths, takers
        self._file = FollowedFile(paths.metrics_jsonl)
        self._settled: dict[int, int] = {}  # the attempts of which it is known what they have replaced
        self.lines_read = 0
        """By all reads together."""
        self.known = KnownKeys()
        self._has_doubles = False  # an older homelab, two of which wrote at once, has left them
        self.refresh()

    @property
    def bytes_read(self) -> int:
        """Of the file, by all reads together."""
        return self._file.bytes_read

    def refresh(self) -> None:
        """Take in what was written since, by whichever process."""
        for text in self._file.new_lines(self._restart):
            self.lines_read += 1
            for line in files.json_objects([text.decode("utf-8", "replace")]):
                if (metric := as_metric(line)) is not None and not self._take(line, metric):
                    self._has_doubles = True

    def add(self, new: Sequence[Line], resumed: Mapping[int, int]) -> None:
        """Keep what is not known yet, and drop what was done again. A disk that refuses is told (`store.best_effort_write`), and no error."""
        if not self._has_doubles and self._settled == resumed and all(line in self.known for line in new if as_metric(line)):
            return
        # What is not taken now is asked for again.
        with store.best_effort_write(self._paths.metrics_jsonl), _alone(self._paths):
            self.refresh()  # another process may have written meanwhile
            fresh = {
                key(line): (line, metric)
                for line in map(_without_secrets, new)
                if (metric := as_metric(line)) is not None and line not in self.known
            }
            newer = KnownKeys(line for line, _ in fresh.values())
            undone = Undone(resumed, self.known, newer)
            kept = [(line, metric) for line, metric in fresh.values() if line not in undone]
            if undone.has_known or self._has_doubles:
                self._rewrite([line for line, _ in kept], undone)
            else:
                store.append_lines(self._paths.metrics_jsonl, [line for line, _ in kept])
            self.refresh()
            for line, metric in kept:  # what the disk has refused is known as long as this process lives
                self._take(line, metric)
            self._settled = dict(resumed)

    def _rewrite(self, kept: Sequence[Line], undone: Undone) -> None:
        """The file without what was done again, line by line: it may be larger than the memory."""

        def lines() -> Iterator[Line]:
            once = KnownKeys()
            for line in lines_of(self._paths):
                if as_metric(line) is not None and line not in undone and once.add(line):
                    yield line
            yield from kept

        with store.best_effort_write(self._paths.metrics_jsonl):
            store.write_lines(self._paths.metrics_jsonl, lines())
        self._file.forget()
        self._restart()

    def _take(self, line: Line, metric: Metric) -> bool:
        """Whether it was not known."""
        is_new = self.known.add(line)
        if is_new:
            for taker in self._takers:
                taker.take(line, metric)
        return is_new

    def _restart(self) -> None:
        self.known, self._has_doubles = KnownKeys(), False
        for taker in self._takers:
            taker.restart()


def lines_of(paths: RunPaths) -> Iterator[Line]:
    """The JSON objects of the file, as they are, one after the other."""
    for text in FollowedFile(paths.metrics_jsonl).new_lines(lambda: None):
        yield from files.json_objects([text.decode("utf-8", "replace")])


def as_metric(line: Line) -> Metric | None:
    """None for what a damaged file holds: the nodes give it again. So a line that has lost whose it is does not count as one of the first rank's,
    which would then never be asked for.
    """
    try:
        metric = read(Metric, line)
    except ValidationError:
        return None
    names = ("attempt", "rank") if metric.kind == "note" else ("attempt", "rank", "step")
    return metric if all(type(line.get(name)) is int for name in names) else None


def _without_secrets(line: Line) -> Line:
    """As it will stand in the file, by which it is known again."""
    return next(iter(files.json_objects([secrets.hide(json.dumps(line, ensure_ascii=False))])), {}) if secrets.are_known() else line


@contextlib.contextmanager
def _alone(paths: RunPaths) -> Iterator[None]:
    """Keep other writers of the file out. Where there can be no lock (a disk that is read-only), what follows says why.

    Raises HomelabError where another process keeps it: a `status` that a person has stopped must not stop the supervisor, too.
    """
    file = paths.root / ".metrics.lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        if not lock.taken(descriptor, LOCK_S):
            raise kept_lock.error("the measurements of this run", file, descriptor, LOCK_S)
        yield
    finally:
        os.close(descriptor)
