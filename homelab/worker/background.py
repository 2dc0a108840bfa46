"""One piece of work in a thread of its own, whose failure is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time. The thread keeps no process alive: who leaves with work undone leaves it undone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.took_s = 0.0  # by the last piece of work that was done

    def start(self, work: Callable[[], object]) -> None:
        """Begin. Waits for the last piece first, and raises what that one raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the work raised, if it has ended so."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until the work is done; raises what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        before = time.perf_counter()
        try:
            work()
        except BaseException as error:  # told to whoever waits or asks
            self._error = error
        else:
            self.took_s = time.perf_counter() - before
