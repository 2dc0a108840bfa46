"""Flaws of a node's clock: every session of the node sees another time (libfaketime; a time namespace has no wall clock)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from homelab.lab.flaws.flaw import NotInjectable, flaw
from homelab.lab.flaws.inside import sessions_have
from homelab.lab.lab import Lab

_FOLDERS = (
    *Path("/usr/lib").glob("*-linux-gnu*/faketime"),
    Path("/usr/lib64/faketime"),
    Path("/usr/local/lib/faketime"),
)


def _library() -> Path:
    for folder in _FOLDERS:
        # The build for programs with threads: ours have some.
        if (folder / "libfaketimeMT.so.1").exists():
            return folder / "libfaketimeMT.so.1"
    raise NotInjectable("libfaketime is not installed", where="this machine", hint="apt install faketime")


def _shifted(lab: Lab, node: str, by: str) -> Iterator[None]:
    # Waiting and measuring go by the monotonic clock, which is right on such a machine too.
    shift = {"LD_PRELOAD": str(_library()), "FAKETIME": by, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    with sessions_have(lab, node, **shift):
        yield


@flaw("clock-ahead", "the node's clock is 7 s ahead", "clock.skew")
def clock_ahead(lab: Lab, node: str) -> Iterator[None]:
    """Enough to make heartbeats and certificates look wrong."""
    yield from _shifted(lab, node, "+7s")


@flaw("clock-little-ahead", "the node's clock is 2 s ahead", "clock.skew")
def clock_little_ahead(lab: Lab, node: str) -> Iterator[None]:
    """Logs no longer sort."""
    yield from _shifted(lab, node, "+2s")


@flaw("clock-behind", "the node's clock is an hour behind", "clock.skew")
def clock_behind(lab: Lab, node: str) -> Iterator[None]:
    """The other system of a machine with two keeps local time in the hardware clock."""
    yield from _shifted(lab, node, "-3600s")
