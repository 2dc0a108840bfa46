"""Where the time of a step goes: computing, or waiting for the other ranks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from homelab.worker.runtime import process_group


class StepTimer:
    """Where the time of one optimizer step goes, in seconds: all of it, the making of its batches, each forward and backward pass, and the
    part in which this rank waits for the others.

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
        self.input_s = 0.0
        self._ready: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._halts: list[list[tuple[Any, Any]]] = []  # of each pass, on a card
        self._halted: Any = None
        self._outside: list[tuple[Any, Any]] = []  # exchanges between passes, on a card
        self._is_passing = False
        self._counted: list[float] = []
        self._exchanged_s = 0.0

    def count_passes(self, passes_s: list[float], waited_s: float) -> None:
        """Passes that were timed elsewhere, and the wait for messages between them."""
        self._counted = passes_s
        self.communication_s += waited_s

    def input_ready(self) -> None:
        """The step's rows are chosen, made into batches and on their way to the device."""
        self.input_s = time.perf_counter() - self.started

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Around one forward and backward pass. It ends with the last gradient, not with the exchange that follows in the last one."""
        self._ready = None
        self._exchanged_s = 0.0
        self._halts.append([])
        start = self._now()
        self._is_passing = True
        yield
        self._is_passing = False
        end = self._now() if self._ready is None else self._ready
        self._passes.append((start, end if self.cuda else end - self._exchanged_s))

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around a collective on weights or gradients, inside a pass or outside. On CUDA it runs beside a pass; between passes the stream waits for it."""
        before: Any
        if self.cuda:
            before = None if self._is_passing else self._now()
            yield
            if before is not None:
                self._outside.append((before, self._now()))
            return
        before = time.perf_counter()
        yield
        took_s = time.perf_counter() - before
        self._exchanged_s += took_s
        self.communication_s += took_s

    def keep_up(self) -> None:
        """On CUDA, Python can be a whole step ahead of the card: wait until the pass before the last one is done.

        A heartbeat after each pass then tells what the card does. One pass stays queued, so the card does not idle.
        """
        if self.cuda and len(self._passes) > 1:
            self._passes[-2][1].synchronize()

    @property
    def passes_s(self) -> list[float]:
        """Seconds of each pass of this step. On CUDA it waits for the last pass: there is no wait after the losses were read."""
        if self._counted:
            return self._counted
        if not self.cuda:
            return [end - start for start, end in self._passes]
        if self._passes:
            self._passes[-1][1].synchronize()  # not the whole card: the optimizer's step may still run while Python continues
        return [_between(whole) - sum(map(_between, halts)) for whole, halts in zip(self._passes, self._halts, strict=True)]

    def gather(self, values: list[float]) -> list[list[float]]:
        """`process_group.gather`, timed."""
        before = time.perf_counter()
        everyone = process_group.gather(values)
        self.communication_s += time.perf_counter() - before
        return everyone

    def gradients_ready(self) -> None:
        """This rank's last gradient of the step is computed."""
        self._ready = self._now()

    def part_computed(self) -> None:
        """The gradients of a part of a divided model are computed. On a card, torch may now let the stream that computes wait for the sums of the
        parts before it: it keeps the input of one sum at a time (2.13, _fsdp_param_group.py, post_backward)."""
        if self.cuda:
            self._halted = self._now()

    def part_goes_on(self) -> None:
        """The stream has waited; the gradients of the part are put together for their sum."""
        if self._halted is not None and self._is_passing:
            self._halts[-1].append((self._halted, self._now()))
            self._halted = None

    def part_ready(self) -> None:
        """The gradients of a part of a divided model are computed, and their sum over the ranks begins. The last part ends this rank's own work.

        On a card, torch lets the stream that computes wait for these sums inside of `backward()` (2.13, _fsdp_param_group.py, finalize_backward),
        and calls this in the stream that sums: without this event the last pass of every rank would end with that of the slowest.
        """
        if self.cuda:
            self._ready = self._now(torch.cuda.default_stream())

    def gradients_reduced(self) -> None:
        """The gradients of all ranks are here."""
        if self._ready is None:
            return
        reduced = self._now()
        if self.cuda:
            reduced.synchronize()
            self.communication_s += sum(map(_between, [(self._ready, reduced), *itertools.chain(*self._halts), *self._outside]))
        else:
            self.communication_s += reduced - self._ready
        self._ready = None

    def _now(self, stream: Any = None) -> Any:
        """Seconds, or on CUDA an event of `stream` (the current one)."""
        if not self.cuda:
            return time.perf_counter()
        # `blocking`: the wait sleeps. NCCL needs the core that a busy wait would use.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event


def _between(events: tuple[Any, Any]) -> float:
    """Seconds between two events of a card."""
    begin, end = events
    return float(begin.elapsed_time(end)) / 1000
