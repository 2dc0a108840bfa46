"""supervisor.json: which process here starts or supervises the run, and its restarts. `exclusive` lets one of them act at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.run import process_owner, stopped_holder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.restart import Restart

DOING, LAUNCHING = "recovering by hand", "launching"
_RESTART = TypeAdapter(Restart)
_LONGEST_STEP_S = 7 * 24 * 3600.0  # more is no measurement
_LOCK_S = 1.0  # a process that only asks for the lock has it for an instant; one that keeps it has written down by then what for


@contextmanager
def exclusive(paths: RunPaths, *, wants_supervisor: bool = False) -> Iterator[None]:
    """Hold the lock of the run's supervisor inside the block: two recoveries would stop each other's attempts.

    Raises InputError when another process has it.
    """
    deadline = time.monotonic() + _LOCK_S
    with ExitStack() as stack:
        while not stack.enter_context(supervisor_lock.held(paths)):
            if time.monotonic() > deadline:
                raise _busy(paths)
            time.sleep(0.05)
        record_holder(paths, DOING, wants_supervisor)
        yield


def record_holder(paths: RunPaths, doing: str, wants_supervisor: bool) -> None:
    """Write down that this process starts the run now, and whether it is to leave a supervisor: it may be killed before it has."""
    record = reset_history(valid_history(store.read_object(paths.supervisor_json)))
    own_entry = {"pid": os.getpid(), "doing": doing, "why": "homelab recover" if doing == DOING else "homelab launch", "since": time.time()}
    store.write_json(paths.supervisor_json, record | own_entry | {"wanted": wants_supervisor, "process": process_owner.mark()})


def is_under_way(record: Mapping[str, Any]) -> bool:
    """Whether the command still runs that was to leave a supervisor. `record`: supervisor.json."""
    process = record.get("process")
    return isinstance(process, dict) and process_owner.lives_here(process)


def _busy(paths: RunPaths) -> InputError:
    state = store.read_object(paths.supervisor_json)
    where = f"{paths.name}, process {state.get('pid', '?')} on this machine"
    stopped = stopped_holder.here(paths)
    if stopped is not None:
        hint = Hint("to let it continue: {}; to do it by hand: {}, then run the command again", stopped.go_on, f"kill -KILL {stopped.pid}")
        return InputError(f"this run is blocked: {stopped.is_stopped}", where=where, hint=hint)
    if state.get("doing") == DOING:
        return InputError("another homelab recover is already working on this run", where=where, hint=homelab("status", paths.name))
    return InputError(
        f"this run has a supervisor that recovers it; now it is {state.get('doing', 'at work')}: {state.get('why', '')}",
        where=where,
        hint=Hint("{}; to do it by hand: kill {}, then run the command again", homelab("status", paths.name), state.get("pid", "PID")),
    )


def valid_history(record: dict[str, Any], attempt_now: int | None = None) -> dict[str, Any]:
    """What the next supervisor needs of the last one's words, as far as they are whole.

    Where the run's attempt is another one than the last supervisor left, a person has recovered it, perhaps from another machine.
    """
    restarts, step_s, attempt = record.get("restarts"), record.get("step_s"), record.get("attempt")
    history = {
        "restarts": [entry for entry in map(_restart, restarts) if entry] if isinstance(restarts, list) else [],
        "step_s": step_s if isinstance(step_s, int | float) and 0 < step_s < _LONGEST_STEP_S else None,
        "attempt": attempt if isinstance(attempt, int) else None,
    }
    was_recovered = attempt_now not in (None, history["attempt"]) and record.get("doing") != "recovering"
    return reset_history(history) if was_recovered else history


def reset_history(whole: dict[str, Any]) -> dict[str, Any]:
    """A person has looked: what was tried before counts no more against the next failure. Only what halves a batch stays."""
    return whole | {"restarts": [entry | {"at": 0.0, "resume_step": -1} for entry in whole["restarts"]]}


def remember(paths: RunPaths, by_hand: Sequence[Restart]) -> None:
    """A recovery by hand counts no more than `reset_history` leaves of others: the next supervisor halves no batch less often."""
    record = store.read_object(paths.supervisor_json)
    restarts = [*valid_history(record)["restarts"], *map(asdict, by_hand)]
    store.write_json(paths.supervisor_json, record | reset_history({"restarts": restarts}))


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
