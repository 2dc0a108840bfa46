"""What the programs share that make something of a run's model: reading the run, writing a folder in one piece, saying the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from homelab.shared.protocol import layout
from homelab.shared.protocol.files import sync
from homelab.worker.checkpoints import held
from homelab.worker.errors import WorkerError, disk_fault, first_words
from homelab.worker.runtime.task import Task


def read_run(run_dir: Path) -> dict[str, Any]:
    """run.json. Raises WorkerError where it cannot be read."""
    try:
        run: dict[str, Any] = json.loads((run_dir / layout.RUN_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkerError(f"this is not a run: {error}", where=str(run_dir / layout.RUN_JSON), hint="`homelab runs` lists runs") from error
    return run


def task_of(run: dict[str, Any], run_dir: Path, step: int = 0) -> Task:
    """The task of rank 0 in the newest attempt that has a plan here, as if it resumed after `step`. Raises WorkerError without one."""
    numbers = sorted((int(folder.name) for folder in (run_dir / layout.ATTEMPTS).glob("*") if folder.name.isdigit()), reverse=True)
    for number in numbers:
        with contextlib.suppress(OSError, ValueError, KeyError):
            plan = json.loads((run_dir / layout.plan_json(number)).read_text(encoding="utf-8"))
            return Task(run_dir, number, plan["ranks"][0]["node"], 0, 0, int(plan["world_size"]), run, {**plan, "resume_step": step})
    raise WorkerError("no plan of this run is on this node", where=str(run_dir / layout.ATTEMPTS), hint="`homelab recover` sends it again")


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into; at the end it takes its place, with all files on the disk. A failure or a signal leaves nothing.

    Raises WorkerError where the disk refuses it.
    """
    folder.parent.mkdir(exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a program that was killed; the same command may run twice
        if left in (partial, old) or not held.is_alive(left.name.split(".")[-2]):
            shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
        sync(folder.parent)
    except (WorkerError, FileNotFoundError):  # a file that is read is missing: that is no fault of the disk
        raise
    except Exception as error:  # the libraries that write have errors of their own
        why = disk_fault(error, folder.parent)
        if why is None:
            raise
        raise WorkerError(
            f"it cannot be written: {why}", where=str(folder), hint="make room on that disk (`df -h` shows it), then repeat the command"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def say(text: str) -> None:
    """A line of progress for the person."""
    print(json.dumps({"say": text}), flush=True)


def answered(work: Callable[[], dict[str, Any]]) -> int:
    """Do the work and print what was made. Returns 0, or an error's code with its three parts on standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is half written is removed on the way out
    try:
        print(json.dumps({"made": work()}), flush=True)
    except WorkerError as error:
        print(error.text, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - of a library: where it came from is all that a person can look at
        fault = _unexpected(error)
        print(fault.text, file=sys.stderr)
        return fault.exit_code
    return 0


def _unexpected(error: Exception) -> WorkerError:
    """An error that no rule knows, in three parts; the last line of ours that it went through is where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if "/homelab/" in frame.filename), frames[-1])
    return WorkerError(
        first_words(error), where=f"{Path(own.filename).name}:{own.lineno}, on this node",
        hint="the trained weights are safe: `homelab fetch` copies them, and vllm serve BASE --enable-lora answers with an adapter. This is a fault of homelab "
        "or of a library: please report it",
    )  # fmt: skip
