"""Two programs that take turns at the same machine, step by step: the side that trains. It says what a step was, and waits to be called."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any


class Turns:
    """One side. `told` at the end of every step; `begin` before the first. What is said goes to standard output, marked with an @."""

    def __init__(self) -> None:
        self._began = math.nan

    def begin(self) -> None:
        """Everything is loaded: wait for the first turn."""
        self._say({"ready": True})

    def told(self, loss: float) -> None:
        """A step is done: its seconds, all of them, and its mean loss per token (nats)."""
        torch = sys.modules.get("torch")  # imported here, because some programs do not need it
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # otherwise the rest of the card's work would count as the other side's step
        seconds = time.perf_counter() - self._began
        self._say({"seconds": seconds, "loss": loss})

    def _say(self, what: dict[str, Any]) -> None:
        print("@" + json.dumps(what), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")
        self._began = time.perf_counter()
