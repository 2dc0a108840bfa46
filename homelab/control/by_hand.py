"""Recovery by hand is alone: while it is under way no supervisor of this machine and no other `homelab recover` acts on the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from homelab.errors import InputError
from homelab.runs import lock, owner, store
from homelab.runs.paths import RunPaths
from homelab.runs.policy import Restart

DOING, LAUNCHING = "recovering by hand", "launching"
_RESTART = TypeAdapter(Restart)
_LONGEST_STEP_S = 7 * 24 * 3600.0  # more is no measurement
_LOCK_S = 1.0  # whoever only asks for the lock has it for an instant; who keeps it has said by then what for


@contextmanager
def alone(paths: RunPaths, options: str, *, wants_supervisor: bool = False) -> Iterator[None]:
    """Hold the lock of the run's supervisor inside the block. Raises InputError when somebody else has it.

    Without it two would stop each other's attempts.
    """
    deadline = time.monotonic() + _LOCK_S
    with ExitStack() as stack:
        while not stack.enter_context(lock.held(paths)):
            if time.monotonic() > deadline:
                raise _busy(paths, options)
            time.sleep(0.05)
        told(paths, DOING, wants_supervisor)
        yield


def told(paths: RunPaths, doing: str, wants_supervisor: bool) -> None:
    """Write down that this process starts the run now, and whether it is to leave a supervisor: it may be killed before it has."""
    known = anew(kept(store.read_object(paths.supervisor_json)))
    mine = {"pid": os.getpid(), "doing": doing, "why": "homelab recover" if doing == DOING else "homelab launch", "since": time.time()}
    store.write_json(paths.supervisor_json, known | mine | {"wanted": wants_supervisor, "process": owner.mark()})


def is_under_way(known: Mapping[str, Any]) -> bool:
    """Whether the command lives that was to leave a supervisor. `known`: supervisor.json."""
    process = known.get("process")
    return isinstance(process, dict) and owner.lives_here(process)


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
    return {
        "restarts": [entry for entry in map(_restart, restarts) if entry] if isinstance(restarts, list) else [],
        "step_s": step_s if isinstance(step_s, int | float) and 0 < step_s < _LONGEST_STEP_S else None,
        "attempt": attempt if isinstance(attempt, int) else None,
    }


def anew(whole: dict[str, Any]) -> dict[str, Any]:
    """A person has looked: what was tried before counts no more against the next failure. Only what halves a batch stays."""
    return whole | {"restarts": [entry | {"at": 0.0, "resume_step": -1} for entry in whole["restarts"]]}


def _restart(entry: Any) -> dict[str, Any] | None:
    """None for what is no restart: one that is forgotten allows one more, and nothing else."""
    try:
        return asdict(_RESTART.validate_python(entry))
    except ValidationError:
        return None


def skipped(paths: RunPaths) -> tuple[str, ...]:
    """The checks that the person left out at the launch, as far as that can be read."""
    names = store.read_object(paths.checks_json).get("skipped")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
