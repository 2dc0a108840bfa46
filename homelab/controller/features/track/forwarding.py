"""`homelab track`: bring a run's metrics to its trackers, beside the run or after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from homelab.controller.base.errors import TakenError
from homelab.controller.base.hint import homelab
from homelab.controller.base.say import Say
from homelab.controller.features.track import forwarder as forwarder_module
from homelab.controller.features.track import forwarder_lock
from homelab.controller.features.track.forwarder import AnyForwarder, EventFileForwarder, Forwarder, Progress
from homelab.controller.features.track.metrics_source import KnownMetrics, MetricsSource
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths

_TICK_S = 1.0
_OVER_S = 60.0  # between two looks at a run that is over, while a tracker does not take the rest: a person may recover it by hand


@dataclass(frozen=True)
class ForwardRequest:
    """`once`: send what is there now, and follow no run. `is_patient`: go on trying for a day after the run's end."""

    trackers: Sequence[str]
    again: bool = False
    once: bool = False
    is_patient: bool = False


def track(fleet: Fleet, paths: RunPaths, wanted: ForwardRequest, say: Say) -> tuple[str, Mapping[str, Progress]]:
    """The run's state, and what each tracker has got. Until the run's end; the trackers are closed also after a Ctrl-C.

    Raises HomelabError where another process sends to one of them, or the disk refuses. What a tracker refuses is in its Progress.
    """
    with ExitStack() as stack:
        forwarders = [_take(stack, paths, tracker, wanted) for tracker in wanted.trackers]
        source = MetricsSource(fleet, paths)
        say("gathering the run's metrics")
        look = source.look()
        looked, told, trouble_since, line = time.monotonic(), set[str](), None, ""  # type: float, set[str], float | None, str
        while True:
            now = time.monotonic()
            is_over = look.is_over or wanted.once or (trouble_since is not None and now - trouble_since > forwarder_module.DAY_S)
            for forwarder in forwarders:
                forwarder.bring(look, is_over=is_over, is_patient=wanted.is_patient, now_s=now)
                _tell(paths, forwarder, told, say)
            has_ended = is_over and all(forwarder.has_ended for forwarder in forwarders)
            # A forwarder that a recovery starts ends at once while this one is here: so this one has to see the next attempt.
            if has_ended and (wanted.once or time.monotonic() - looked <= look.next_s):
                break
            if not has_ended:
                time.sleep(_TICK_S)
            if not wanted.once and time.monotonic() - looked > (_OVER_S if is_over and not has_ended else look.next_s):
                look, looked = source.look(), time.monotonic()
                trouble_since = (trouble_since or looked) if look.trouble else None
                if line != (line := _line(forwarders, look)):
                    say(line)
    return look.state, {forwarder.tracker: forwarder.progress for forwarder in forwarders}


def _take(stack: ExitStack, paths: RunPaths, tracker: str, wanted: ForwardRequest) -> AnyForwarder:
    if not stack.enter_context(forwarder_lock.held(paths, tracker)):
        raise TakenError(
            f"another process sends this run to {tracker} already",
            where=f"run {paths.name}, {paths.tracking}",
            hint=homelab("status", paths.name),
        )
    forwarder = EventFileForwarder(paths) if tracker == "tensorboard" else Forwarder(paths, tracker, again=wanted.again)
    stack.callback(forwarder.close)
    return forwarder


def _tell(paths: RunPaths, forwarder: AnyForwarder, told: set[str], say: Say) -> None:
    """A problem when it comes, here and among the run's events, and not again until the tracker has taken something."""
    problem = forwarder.problem
    if problem is None and forwarder.tracker in told:
        told.remove(forwarder.tracker)
        say(f"{forwarder.tracker} takes the run's metrics again")
    elif problem is not None and forwarder.tracker not in told:
        told.add(forwarder.tracker)
        say(f"{problem.message}\n  where: {problem.where}\n  fix:   {problem.hint}")
        event_log.append(paths, event("note", text=f"{problem.message} (the run is not touched)"))


def _line(forwarders: Sequence[AnyForwarder], look: KnownMetrics) -> str:
    counts = ", ".join(f"{forwarder.tracker} {forwarder.progress.sent} of {forwarder.progress.total}" for forwarder in forwarders)
    return f"{look.state}: {counts} points{f'; {look.trouble}' if look.trouble else ''}"
