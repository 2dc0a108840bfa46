"""The checkpoint of an attempt that ends before its run: a peer is lost, a pass finds no memory, or a stop ends what is left.

Between two optimizer steps a rank that has all of the state has the run as it is after the last of them, and the next attempt need not do a step
again. The first rank of each node saves it without asking anybody. It does not while an optimizer steps, or after an error of the user's.

A rank that waits for a silent peer runs no Python in its main thread, so a second thread hears the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from homelab.shared.protocol import waiting_mark

MOST_S = 10.0  # what a save may cost: who stops the run waits for it (`homelab.node.system.processes`)


class PartingSave:
    """One per rank. `save` writes the state of the last whole step; it is called at most once."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        # Held while the state is none of a whole step, and for ever by whoever saves it: the training waits then until the process ends.
        self._whole = threading.Lock()
        self._is_changing = False

    def begin_change(self) -> None:
        """From now on the state is none of a whole step."""
        self._whole.acquire()
        self._is_changing = True

    def end_change(self) -> None:
        """The state is whole, and what it is has been written down."""
        self._is_changing = False
        self._whole.release()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around what must be whole in a checkpoint, or not in it."""
        self.begin_change()
        try:
            yield
        finally:
            self.end_change()

    def disarm(self) -> None:
        """From now on there is nothing to save: the weights become those of an earlier step."""
        with self.changing():
            self._save = lambda: None

    def listen(self) -> None:
        """Save at SIGTERM, and end by it. For the main thread of a process; elsewhere nothing is heard."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        threading.Thread(target=self._hear, args=(reading,), daemon=True, name="parting").start()

    def at_fault(self) -> None:
        """Save after an error of the training, where the state is whole."""
        if not self._is_changing:
            self._whole.acquire()  # where the other thread has it, that one ends this process
            self._save_quietly()

    def _hear(self, reading: int) -> None:
        while os.read(reading, 1) != bytes([signal.SIGTERM]):
            pass
        if self._whole.acquire(timeout=MOST_S):
            self._save_quietly()
        ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_DFL)  # Python's own is for the main thread alone
        os.kill(os.getpid(), signal.SIGTERM)

    def _save_quietly(self) -> None:
        """A save that fails takes nothing away: the checkpoints before it are there."""
        name, usual = Path("/proc/self/comm"), ""
        try:
            usual = name.read_text(encoding="utf-8").strip()
            name.write_text(waiting_mark.SAVES, encoding="utf-8")
            self._save()
        except Exception as error:  # noqa: BLE001 - a full disk, a card that is gone; the fault itself is what is reported
            print(f"the state could not be saved at the end of this attempt: {error}", file=sys.stderr, flush=True)
        finally:
            if usual:
                name.write_text(usual, encoding="utf-8")
