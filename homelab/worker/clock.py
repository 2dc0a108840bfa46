"""Where the time of a step goes: computing, or waiting for the other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from homelab.worker import ranks


class StepClock:
    """Where the time of one optimizer step goes, in seconds: all of it, each forward and backward pass, and the part in which this
    rank waits for the others.

    The gradient all-reduce overlaps the backward pass; what counts as communication is what the backward pass still waits
    for after this rank's last gradient is ready. On CUDA that is measured with events, as kernels run later than Python.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.begin()

    def begin(self) -> None:
        """A new step starts now."""
        self.started = time.perf_counter()
        self.communication_s = 0.0
        self._ready: Any = None
        self._passes: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Around one forward and backward pass. It ends with the last gradient, not with the exchange that follows in the last one."""
        self._ready = None
        start = self._now()
        yield
        self._passes.append((start, self._now() if self._ready is None else self._ready))

    def keep_up(self) -> None:
        """On CUDA, Python is ahead of the card, by a whole step where nothing holds it up: wait until the pass before the last one is done.

        So a sign of life after each pass tells what the card does; one pass is queued all the while, and the card never idles for it.
        """
        if self.cuda and len(self._passes) > 1:
            self._passes[-2][1].synchronize()

    @property
    def passes_s(self) -> list[float]:
        """Seconds of each pass of this step. On CUDA it waits for the last pass: ask after the losses were read, and it is no wait."""
        if not self.cuda:
            return [end - start for start, end in self._passes]
        if self._passes:
            self._passes[-1][1].synchronize()  # not the whole card: the optimizer's step may run on while Python goes on
        return [start.elapsed_time(end) / 1000 for start, end in self._passes]

    def gather(self, values: list[float]) -> list[list[float]]:
        """`ranks.gather`, on the clock."""
        before = time.perf_counter()
        everyone = ranks.gather(values)
        self.communication_s += time.perf_counter() - before
        return everyone

    def gradients_ready(self) -> None:
        """This rank's last gradient of the step is computed."""
        self._ready = self._now()

    def gradients_reduced(self) -> None:
        """The averaged gradients are here."""
        if self._ready is None:
            return
        done = self._now()
        if self.cuda:
            done.synchronize()
            self.communication_s += self._ready.elapsed_time(done) / 1000
        else:
            self.communication_s += done - self._ready
        self._ready = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        # `blocking`: a wait for it sleeps. NCCL wants the core that a spinning one would take.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def reduce_hook(self, reduction, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        """DDP's communication hook: a `compress.Reduction` averages over ranks; the clock hears when the last bucket is ready."""
        if bucket.is_last():
            self.gradients_ready()
        return reduction.reduce(bucket)
