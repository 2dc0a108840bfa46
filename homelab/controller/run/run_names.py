"""Which run a word means, of the runs that are known. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain_name

_WHOLE = re.compile(r"\d{4}-\d\d-\d\d-\d{4}-.")


def is_whole(name: str) -> bool:
    """Whether it begins as the whole name of a run does: it may be that of one which is not known here."""
    return _WHOLE.match(name) is not None


def choose(name: str, names: Sequence[str]) -> str | None:
    """The run meant by `name`: itself, or the only one that starts or ends with it; None when there is none.

    One of the same minute has the same name with a number: by the name without it a run is meant that is gone. Raises InputError when several are meant.
    """
    if name in names or not name:
        return name or None
    near = [
        run
        for run in names
        if run.endswith(name) or (run.startswith(name) and not (is_whole(name) and re.fullmatch(r"-\d+", run[len(name) :])))
    ]
    if len(near) > 1:
        raise InputError(
            f'"{plain_name(name)}" matches {len(near)} runs',
            where=", ".join(near[:5]),
            hint=Hint("give a longer part of the name; {} lists the runs", homelab("runs")),
        )
    return near[0] if near else None


def unknown(name: str, names: Sequence[str]) -> InputError:
    """The error for a run that does not exist."""
    return InputError(
        f'no run is called "{plain_name(name)}".{did_you_mean(name[:200], names)}',
        where="this controller and the reachable nodes",
        hint=homelab("runs"),
    )
