"""Recovery by hand is alone: while it is under way no supervisor of this machine and no other `homelab recover` acts on the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from homelab.errors import HomelabError, InputError
from homelab.runs import lock, store
from homelab.runs.paths import RunPaths
from homelab.runs.policy import Restart

DOING = "recovering by hand"
_LOCK_S = 1.0  # whoever only asks for the lock has it for an instant; who keeps it has said by then what for


@contextmanager
def alone(paths: RunPaths, options: str) -> Iterator[None]:
    """Hold the lock of the run's supervisor inside the block. Raises InputError when somebody else has it.

    Without it two would stop each other's attempts.
    """
    deadline = time.monotonic() + _LOCK_S
    with ExitStack() as stack:
        while not _taken(stack, paths):
            if time.monotonic() > deadline:
                raise _busy(paths, options)
            time.sleep(0.05)
        known = store.read_object(paths.supervisor_json)
        store.write_json(
            paths.supervisor_json,
            kept(known) | {"pid": os.getpid(), "doing": DOING, "why": "homelab recover", "since": time.time()},
        )
        yield


def _taken(stack: ExitStack, paths: RunPaths) -> bool:
    try:
        return stack.enter_context(lock.held(paths))
    except OSError as error:
        raise HomelabError(
            f"the lock of this run cannot be had: {error.strerror}",
            where=str(paths.supervisor_lock),
            hint=f"ls -ld {paths.root} {paths.supervisor_lock}",
        ) from error


def _busy(paths: RunPaths, options: str) -> InputError:
    state = store.read_object(paths.supervisor_json)
    where = f"{paths.name}, process {state.get('pid', '?')} on this machine"
    if state.get("doing") == DOING:
        return InputError(
            "this run is being recovered already, by another homelab recover",
            where=where,
            hint=f"homelab status {paths.name}{options}",
        )
    return InputError(
        f"this run has a supervisor that recovers it by itself; now it is {state.get('doing', 'at work')}: {state.get('why', '')}",
        where=where,
        hint=f"homelab status {paths.name}{options}; to do it by hand: kill {state.get('pid', 'PID')}, then once more",
    )


def kept(known: dict[str, Any]) -> dict[str, Any]:
    """What the next supervisor needs of the last one's words, as far as they are whole."""
    restarts, step_s, attempt = known.get("restarts"), known.get("step_s"), known.get("attempt")
    try:
        restarts = [asdict(Restart(**entry)) for entry in restarts] if isinstance(restarts, list) else []
    except TypeError:
        restarts = []
    return {
        "restarts": restarts,
        "step_s": step_s if isinstance(step_s, int | float) else None,
        "attempt": attempt if isinstance(attempt, int) else None,
    }
