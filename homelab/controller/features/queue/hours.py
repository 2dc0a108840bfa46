"""The hours in which a job may train: wall times of this machine's clock, judged anew at each look. Pure.

With both times a job trains from `not_before` to `stop_at` of each day. With `not_before` alone it waits for that time once. A clock that is set, or a
change to summer time, changes the answer at the next look, and nothing else.
"""

from __future__ import annotations

import time

from homelab.controller.base import daily_hours
from homelab.controller.base.errors import InputError
from homelab.controller.features.queue.queued_job import QueuedJob


def parsed(text: str, option: str) -> str:
    """HH:MM, from what was typed. Raises InputError."""
    try:
        return daily_hours.clock(daily_hours.minute(text))
    except ValueError:
        raise InputError(
            f'"{text}" is no time of day', where=f"{option} {text}", hint=f"write hours and minutes, 00:00 to 23:59: {option} 23:00"
        ) from None


def window(not_before: str, stop_at: str, now: float) -> tuple[str, str]:
    """Both times as they are kept: a job that is to stop may go on at `not_before`, which is now if nobody said it. Raises InputError."""
    begins = parsed(not_before, "--not-before") if not_before else ""
    if not stop_at:
        return begins, ""
    ends = parsed(stop_at, "--stop-at")
    begins = begins or time.strftime("%H:%M", time.localtime(now))
    if begins == ends:
        raise InputError(
            f"from {begins} to {ends} there is no time to train", where=f"--not-before {begins} --stop-at {ends}",
            hint="choose two different times, or leave --stop-at out",
        )  # fmt: skip
    return begins, ends


def is_open(job: QueuedJob, now: float) -> bool:
    """Whether the job may train now."""
    if job.not_before and job.stop_at:
        clock = time.localtime(now)
        return daily_hours.is_within((_minute(job.not_before), _minute(job.stop_at)), clock.tm_hour * 60 + clock.tm_min)
    return not job.not_before or now >= following(job.not_before, job.added_at)


def opens(job: QueuedJob, now: float) -> float:
    """The first moment from now on at which the job may train."""
    if is_open(job, now):
        return now
    return following(job.not_before, now if job.stop_at else job.added_at)


def closes(job: QueuedJob, now: float) -> float | None:
    """When the job is stopped that trains now; None if it trains to its end."""
    return following(job.stop_at, now) if job.stop_at else None


def following(clock: str, moment: float) -> float:
    """The first moment at or after this one at which the clock shows HH:MM."""
    minute, day = _minute(clock), time.localtime(moment)
    for later in (0, 1, 2):
        # mktime puts right what is no time of a day: the 32nd, or an hour that summer time leaves out.
        at = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + later, minute // 60, minute % 60, 0, 0, 0, -1))
        if at >= moment - moment % 60:
            return max(at, moment)
    return moment


def _minute(clock: str) -> int:
    """Of a job's file, in which anything may stand."""
    try:
        return daily_hours.minute(clock)
    except ValueError:
        return 0
