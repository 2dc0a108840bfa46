"""What grows from attempt to attempt is seen, and what only comes and goes is not."""

from __future__ import annotations

import pytest
from benchmarks.faults.footprint import Footprint, grown, too_much

ATTEMPTS = 50


def held(*, each: dict[str, float] | None = None, pid: int = 7) -> list[Footprint]:
    """A row of attempts: two descriptors, threads and processes come and go, and of `each` so many stay at every attempt."""
    more = each or {}

    def of(attempt: int) -> Footprint:
        goes = attempt % 3
        return Footprint(
            pid,
            attempt,
            16 + goes + int(more.get("descriptors", 0) * attempt),
            15 + goes + int(more.get("threads", 0) * attempt),
            80.0 + 0.25 * attempt + more.get("resident_mib", 0) * attempt,
            9 + goes + int(more.get("on_nodes", 0) * attempt),
        )

    return [of(attempt) for attempt in range(1, ATTEMPTS + 1)]


def test_what_comes_and_goes_is_no_growth() -> None:
    figures = grown(held())
    assert figures["soak_supervisor_attempts"] == ATTEMPTS - 1
    assert figures["soak_supervisor_descriptors_more"] == figures["soak_supervisor_threads_more"] == figures["soak_on_nodes_more"] == 0
    assert not too_much(figures)


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("descriptors", "soak_supervisor_descriptors_more"),
        ("threads", "soak_supervisor_threads_more"),
        ("resident_mib", "soak_supervisor_mib_more"),
        ("on_nodes", "soak_on_nodes_more"),
    ],
)
@pytest.mark.parametrize("each", [1.0, 0.5])
def test_what_stays_at_every_attempt_is_said(name: str, figure: str, each: float) -> None:
    """One of each at every attempt, and at every other one."""
    (said,) = too_much(grown(held(each={name: each})))
    assert said.startswith(f"{figure}: "), said


def test_the_supervisor_that_saw_most_attempts_is_judged() -> None:
    """A supervisor is killed in a soak: what its successor holds is no growth of the one before."""
    figures = grown([*held()[:5], *held(pid=8)[5:]])
    assert figures["soak_supervisor_attempts"] == ATTEMPTS - 6


def test_a_row_without_a_supervisor_is_not_flat() -> None:
    assert grown([]) == {} == grown(held()[:1])
    assert too_much({})
