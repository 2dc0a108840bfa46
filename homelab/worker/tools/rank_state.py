"""What a rank of a short job is doing, in a file that the node's agent reads, and the frame of such a rank (`homelab.node.collective_check`).

Its current stage is in `rank-R.json` of the folder HOMELAB_COLLECTIVE_DIR; SIGUSR1 makes it write the stacks of its threads to `rank-R.stack` there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from homelab.worker.errors import WorkerError

_PR_SET_PDEATHSIG = 1


class StateFile:
    """What this rank is doing, in a file that is never half written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._path = folder / f"rank-{rank}.json"
        self._partial = folder / f"rank-{rank}.partial"
        self.known: dict[str, Any] = {"pid": os.getpid()}

    def __call__(self, stage: str | None = None, **more: Any) -> None:
        """Write it down; without `stage` it stays what it was."""
        self.known |= more if stage is None else {"stage": stage, **more}
        self._partial.write_text(json.dumps(self.known), encoding="utf-8")
        self._partial.replace(self._path)


def watched(work: Callable[[StateFile], None]) -> int:
    """Do the work of one rank. Returns 0 when it came to its end, 1 when something was raised, which is written down."""
    folder, rank = Path(os.environ["HOMELAB_COLLECTIVE_DIR"]), int(os.environ["RANK"])
    with contextlib.suppress(OSError, AttributeError):  # Linux: nothing of the job outlives its torchrun
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    stacks = (folder / f"rank-{rank}.stack").open("w", encoding="utf-8")  # never closed: a signal may come at any time
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    state = StateFile(folder, rank)
    try:
        work(state)
    except WorkerError as error:
        state(error=error.text[:4000])
        print(error.text, file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - every error of a rank is its state
        state(error=f"{type(error).__name__}: {str(error).strip()}"[:2000])
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End the process without torch's destructors, which abort now and then (see `homelab.worker.__main__`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
