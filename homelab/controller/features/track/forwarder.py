"""Sending a run's points to one tracker: each once, going on after the last that was sent, whatever ended the process before."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.controller.base import package, redact
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.features.track import event_files, sent
from homelab.controller.features.track.event_files import EventFiles
from homelab.controller.features.track.metrics_source import KnownMetrics
from homelab.controller.features.track.points import Key, TrackedPoint
from homelab.controller.features.track.trackers import TRACKERS, Sink, TrackerJob, TrackerKind
from homelab.controller.run import run_folder, store
from homelab.controller.run.paths import RunPaths

_FIRST_S, _LONGEST_S = 2.0, 300.0
TRIES_AFTER_END = 4
DAY_S = 24 * 3600.0
_BATCH = 200  # points between two writings of the state


@dataclass(frozen=True)
class Progress:
    """What a tracker has got. `total`: points that there are; `waiting` of them are not certain yet, as a recovery may compute them again.

    `repeated`: points that were computed again after they were sent.
    """

    sent_now: int
    sent: int
    total: int
    waiting: int
    repeated: int
    problem: HomelabError | None

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        problem = self.problem.as_dict() if self.problem else None
        return {
            "sent_now": self.sent_now,
            "sent": self.sent,
            "points": self.total,
            "waiting": self.waiting,
            "repeated": self.repeated,
            "problem": problem,
        }


class Forwarder:
    """Of one run and one tracker, under its lock. `again`: from the first step, as a new run of the tracker."""

    def __init__(self, paths: RunPaths, tracker: str, *, again: bool) -> None:
        self.tracker, self._paths = tracker, paths
        self._file = paths.tracking / f"{tracker}.json"
        state = store.read_object(self._file)
        number, known_as = state.get("number"), state.get("known_as")
        self._number = number if type(number) is int else 1
        self._known_as = known_as if isinstance(known_as, str) else ""
        # What a process that was killed was about to send counts as sent: a step may be missing then, and none is there twice.
        self._sent: dict[Key, int] = sent.attempts_of(state.get("sent")) | sent.attempts_of(state.get("sending"))
        if again and self._sent:
            self._number, self._known_as, self._sent = self._number + 1, "", {}
        self._sink: Sink | None = None
        self._failures, self._next_try, self._over_since = 0, 0.0, None  # type: int, float, float | None
        self.problem: HomelabError | None = None
        self.has_given_up = False
        self._sent_now = 0
        self._points: Sequence[TrackedPoint] = ()
        self._certain: Sequence[TrackedPoint] = ()

    @property
    def progress(self) -> Progress:
        """What it has got up to now."""
        have = sum(1 for point in self._points if point.key in self._sent)
        waiting = len(sent.due(self._points, self._sent)) - len(sent.due(self._certain, self._sent))
        return Progress(self._sent_now, have, len(self._points), waiting, sent.repeated(self._points, self._sent), self.problem)

    @property
    def has_ended(self) -> bool:
        """Nothing is left to do for what it was brought."""
        return self.has_given_up or (self.problem is None and not sent.due(self._certain, self._sent))

    def bring(self, look: KnownMetrics, *, is_over: bool, is_patient: bool, now_s: float) -> None:
        """Send what is due, unless it waits before its next try. What the tracker raises becomes `problem`. Raises HomelabError where the disk refuses.

        A tracker keeps what it has got, so it gets a step of a run that lives only when no recovery computes it again.
        """
        self._points = look.points
        self._certain = look.points if look.is_over else [point for point in look.points if point.step <= look.certain_step]
        if is_over and self._over_since is None:
            self._over_since = now_s
        elif not is_over and self._over_since is not None:  # it was recovered
            self._over_since, self.has_given_up = None, False
        if self.has_given_up or now_s < self._next_try or (not sent.due(self._certain, self._sent) and self._sink is None):
            return
        try:
            self._send(sent.due(self._certain, self._sent))
            if is_over:
                self._close()
        except HomelabError as error:  # the package is not there, or the disk refuses: trying again changes nothing
            self.problem, self.has_given_up = error, True
        except Exception as error:  # noqa: BLE001 - a tracker library raises what it likes
            self._fail(error, is_patient=is_patient, now_s=now_s)
        else:
            self._failures, self.problem = 0, None
        self._write()

    def close(self) -> None:
        """Let the tracker finish what it still holds."""
        try:
            self._close()
        except Exception as error:  # noqa: BLE001 - a tracker library raises what it likes
            self.problem = self.problem or self._problem(error)
            self._write()

    def _send(self, points: Sequence[TrackedPoint]) -> None:
        for first in range(0, len(points), _BATCH):
            batch = points[first : first + _BATCH]
            with contextlib.redirect_stdout(sys.stderr):  # trackers greet; --json is a document
                sink = self._sink = self._sink or self._open()
                self._write({point.key: point.attempt for point in batch})
                for point in batch:
                    sink.send(point)
                    self._sent[point.key] = point.attempt
                    self._sent_now += 1
            self._write()

    def _open(self) -> Sink:
        tracker = TRACKERS[self.tracker]
        package.require(*tracker.package)
        recipe = run_folder.description_of(self._paths).recipe
        settings = recipe.model_dump(mode="json", include={"model", "data", "objective", "method", "train"}, exclude_none=True)
        name = self._paths.name if self._number == 1 else f"{self._paths.name}-again-{self._number}"
        sink = tracker.open(TrackerJob(name, self._known_as, settings))
        self._known_as = sink.known_as
        return sink

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.redirect_stdout(sys.stderr):
                sink.close()

    def _fail(self, error: Exception, *, is_patient: bool, now_s: float) -> None:
        self._failures += 1
        self.problem = self._problem(error)
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
                sink.close()
        self._next_try = now_s + retry_wait_s(self._failures)
        since_end_s = None if self._over_since is None else now_s - self._over_since
        nothing_left = not sent.due(self._certain, self._sent)  # what was sent is not sent again
        self.has_given_up = (since_end_s is not None and nothing_left) or gives_up_after(self._failures, since_end_s, is_patient=is_patient)

    def _problem(self, error: Exception) -> HomelabError:
        tracker: TrackerKind = TRACKERS[self.tracker]
        said = redact.text(" ".join(plain_lines(str(error)).split()))[:300]
        return HomelabError(
            f"{self.tracker} refuses the run's metrics: {type(error).__name__}: {said}",
            where=f"{self.tracker}, run {self._paths.name}; the run itself is not touched",
            hint=Hint(
                "is it running, and is its key right ({})? Then: {}", tracker.login, homelab(f"track --to {self.tracker}", self._paths.name)
            ),
        )

    def _write(self, sending: Mapping[Key, int] | None = None) -> None:
        """Before a batch (`sending`) and after it."""
        state = {
            "number": self._number, "known_as": self._known_as, "sent": sent.spans(self._sent), "sending": sent.spans(sending or {}),
            "problem": self.problem.as_dict() if self.problem else None, "updated_at": time.time(),
        }  # fmt: skip
        store.write_json(self._file, state)


class EventFileForwarder:
    """The same for TensorBoard's event files, which can be changed afterwards: they are written anew by each process."""

    tracker = "tensorboard"

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._files: EventFiles | None = None
        self._points: Sequence[TrackedPoint] = ()
        self.problem: HomelabError | None = None
        self.has_given_up = False

    @property
    def progress(self) -> Progress:
        """What it has got up to now."""
        count = len(self._points) if self._files else 0
        return Progress(count, count, len(self._points), 0, 0, self.problem)

    @property
    def has_ended(self) -> bool:
        """Every look is written as a whole, or refused."""
        return True

    def bring(self, look: KnownMetrics, *, is_over: bool, is_patient: bool, now_s: float) -> None:
        """Write what is new or changed."""
        self._points = look.points
        if self.has_given_up:
            return
        try:
            package.require("tensorboard", event_files.REQUIREMENT)
            with store.disk_errors_as_hints(self._paths.event_files):
                self._files = self._files or EventFiles(self._paths.event_files)
                self._files.bring(look.points)
        except HomelabError as error:
            self.problem, self.has_given_up = error, True

    def close(self) -> None:
        """Close the file."""
        if self._files is not None:
            self._files.close()


AnyForwarder = Forwarder | EventFileForwarder


def retry_wait_s(failures: int) -> float:
    """After so many failures in a row: twice as long each time, five minutes at most."""
    return float(min(_LONGEST_S, _FIRST_S * 2 ** min(failures - 1, 20)))


def gives_up_after(failures: int, since_end_s: float | None, *, is_patient: bool) -> bool:
    """While the run lives (`since_end_s` is None) never; after its end with the fourth failure, or, of a patient one, after a day."""
    if since_end_s is None:
        return False
    return since_end_s > DAY_S if is_patient else failures >= TRIES_AFTER_END
