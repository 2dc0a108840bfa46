"""How long a forwarder waits before it tries a tracker again. Pure."""

from __future__ import annotations

_FIRST_S, _LONGEST_S = 2.0, 300.0
TRIES_AFTER_END = 4
DAY_S = 24 * 3600.0


def wait_s(failures: int) -> float:
    """After so many failures in a row: twice as long each time, five minutes at most."""
    return float(min(_LONGEST_S, _FIRST_S * 2 ** min(failures - 1, 20)))


def gives_up(failures: int, since_end_s: float | None, *, is_patient: bool) -> bool:
    """While the run lives (`since_end_s` is None) never; after its end with the fourth failure, or, of a patient one, after a day."""
    if since_end_s is None:
        return False
    return since_end_s > DAY_S if is_patient else failures >= TRIES_AFTER_END
