"""One piece of work in a thread of its own, whose failure is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time. The thread does not keep the process alive: unfinished work ends with the process."""

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
        """Raise the error of the work, if it has ended with one."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done; raises its error, once."""
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
        except BaseException as error:  # raised by the next `wait` or `check`
            self._error = error
        else:
            self.took_s = time.perf_counter() - before
