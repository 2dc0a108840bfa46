"""A rank on this card is killed: seconds until the next attempt's first step, with a process that waits for it and with none, and what that one holds.

The supervisor does everything by itself, as after `homelab launch`. The node is this machine.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import evening, material, ranks, smi
from benchmarks.gpu_parts.home import Home
from benchmarks.gpu_parts.place import Place

from homelab.shared.protocol import waiting_mark

_ATTEMPTS = 3
_LIMIT_S = 90.0
_SAVE_EVERY = 50  # rarely, so that a next attempt that lost nothing had a save at its end


def measure(place: Place) -> None:
    """Prepared, with two faults in one run; then the same with nothing prepared."""
    model = material.model(place.folder / "model", "small" if place.is_card else "tiny", "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(4000, 200))
    for name in ("standby", "cold"):
        with place.attempt(name):
            _faults(place, name, model, data)


def _faults(place: Place, name: str, model: Path, data: Path) -> None:
    home = Home.of(place, name)
    recipe = home.folder / f"{name}.toml"
    text = evening.RECIPE.format(model=model, data=data, steps=10**5, every=_SAVE_EVERY, precision="bf16" if place.is_card else "fp32")
    text += f"[recovery]\nmax_restarts = 9\nstandby = {str(name == 'standby').lower()}\n"
    recipe.write_text(text, encoding="utf-8")
    try:
        said = home.type("launch", str(recipe))
        place.gate(f"{name}_launches", said.code == 0)
        (run,) = (home.folder / "work" / "runs").iterdir()
        for attempt in range(1, _ATTEMPTS):
            with place.attempt(f"{name}, fault {attempt}"):
                _fault(place, name, home, run, attempt)
    finally:
        home.type("stop", limit_s=30)


def _fault(place: Place, name: str, home: Home, run: Path, attempt: int) -> None:
    _until(lambda: len(_steps(run, attempt)) >= 5, "it does not train")
    if name == "standby":
        _until(lambda: len(_waiting(home.folder)) > 0, "nothing waits")
    pids = [pid for pid in evening.workers(home.folder) if pid not in _waiting(home.folder)]
    held, working, waiting = smi.held_bytes(_waiting(home.folder)), smi.held_bytes(pids), len(_waiting(home.folder))
    done, began = _steps(run, attempt)[-1], time.monotonic()
    for pid in pids:  # as a crash, then as who tells it to end
        os.kill(pid, signal.SIGKILL if attempt == 1 else signal.SIGTERM)
    _until(lambda: bool(_steps(run, attempt + 1)), "nothing goes on")
    seconds, before, after = time.monotonic() - began, _steps(run, attempt)[-1], _steps(run, attempt + 1)[0]
    place.run(
        f"{name}, fault {attempt}",
        seconds=seconds,
        last_step=before,
        first_step=after,
        seen_step=done,
        waiting=waiting,
        held_bytes=held,
        pids=pids,
    )
    place.figure(f"{name}_fault_{attempt}_to_step_s", seconds)
    if waiting and (working or not place.is_card):  # else nvidia-smi names no process here, and says nothing by it
        place.gate("who_waits_holds_nothing_of_the_card", not sum(held))
    if attempt > 1:  # a rank that is told to end saves; who is killed alone cannot
        place.gate(f"{name}_no_step_is_done_again", after == before + 1)


def _steps(run: Path, attempt: int) -> list[int]:
    file = run / "attempts" / str(attempt) / "ranks" / "0" / "metrics.jsonl"
    lines: list[dict[str, Any]] = (
        [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    return [line["step"] for line in lines if line["kind"] == "train"]


def _waiting(folder: Path) -> list[int]:
    """Ranks of an attempt to come."""
    return [pid for pid in evening.workers(folder) if _name(pid) == waiting_mark.WAITS]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _until(holds: Callable[[], bool], else_: str) -> None:
    deadline = time.monotonic() + _LIMIT_S * ranks.patience()
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(else_)
        time.sleep(0.01)
