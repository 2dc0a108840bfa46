"""A wrong clock: every session of the node sees another time (libfaketime; a time namespace has no wall clock)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from homelab.lab.lab import Lab
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable, add
from scripts.practice.misconfigurations.node_changes import sessions_have

_FOLDERS = (*Path("/usr/lib").glob("*-linux-gnu*/faketime"), Path("/usr/lib64/faketime"), Path("/usr/local/lib/faketime"))


def _library() -> Path:
    for folder in _FOLDERS:
        # The build for programs with threads, which ours have.
        if (folder / "libfaketimeMT.so.1").exists():
            return folder / "libfaketimeMT.so.1"
    raise NotInjectable("libfaketime is not installed", where="this machine", hint="apt install faketime")


def _shifted(by: str) -> Inject:
    @contextlib.contextmanager
    def inject(lab: Lab, node: str) -> Iterator[None]:
        # Waiting and measuring use the monotonic clock, which is right on such a machine too.
        shift = {"LD_PRELOAD": str(_library()), "FAKETIME": by, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        with sessions_have(lab, node, **shift):
            yield

    return inject


add("clock-ahead", "the node's clock is 7 s ahead", "clock.skew", inject=_shifted("+7s"))
add("clock-little-ahead", "the node's clock is 2 s ahead", "clock.skew", inject=_shifted("+2s"))
add("clock-behind", "the node's clock is an hour behind", "clock.skew", inject=_shifted("-3600s"))
