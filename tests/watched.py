"""A part of a test in a process of its own, in which Python's audit events tell what it opens and which programs it starts.

A hook of `sys.addaudithook` stays for the life of its process and is called at each event: the tests after it in the same process took
up to a hundred times as long (302 s in the place of 2, measured with one of hypothesis).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
opened: list[str] = []
started: list[str] = []


@dataclass(frozen=True)
class Apart(Generic[Result]):
    """What the part returned, and the most memory that its process took: what the tests before it have imported is not the part's."""

    result: Result
    peak_mb: int


def apart(part: Callable[[], Result]) -> Apart[Result]:
    """Call `part` in a child of this process. `opened` and `started` fill in there. Raises AssertionError with what it raised."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(part, theirs))
    process.start()
    theirs.close()
    try:
        said, value = ours.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the part ended without a word, with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    assert said == "done", value
    return value


def _child(part: Callable[[], Any], pipe: Any) -> None:
    sys.addaudithook(_watch)
    # What the tests before it have left to the collector would be freed here, and what they have given back to the allocator would be taken
    # from it: each hides as much of the part's own memory.
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is taken now
    began_kb = _peak_kb()
    try:
        result = part()
    except BaseException:  # of an assertion, too: it is the parent that fails
        pipe.send(("failed", traceback.format_exc()))
    else:
        pipe.send(("done", Apart(result, (_peak_kb() - began_kb) * 1024 // 10**6)))


def _peak_kb() -> int:
    """The most resident memory of this process since its peak was reset, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        opened.append(str(args[0]))
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        started.append(str(args))
