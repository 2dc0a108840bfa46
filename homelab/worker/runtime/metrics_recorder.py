"""The files that a rank writes under attempts/<n>/ranks/<rank>/: metrics, notes, samples and its heartbeat."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from homelab.shared.protocol import files, layout, phases
from homelab.worker.balancing.balancer import Rebalancing
from homelab.worker.runtime.task import Task

SIGN_S = 1.0  # between two signs of one phase: a pass may take a millisecond


def forget_earlier(task: Task, name: str) -> None:
    """Remove this rank's file of earlier attempts, where only the newest is read: a run of months has thousands of attempts."""
    folder = task.run_dir / layout.ATTEMPTS
    for attempt in os.listdir(folder):
        if attempt.isdecimal() and int(attempt) < task.attempt:
            with contextlib.suppress(OSError):
                os.unlink(folder / attempt / "ranks" / str(task.rank) / name)


class Recorder:
    """Writes this rank's files. Each line is flushed, so a killed process loses at most the step it was in."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.total_steps = 0
        self.step_tokens = 0.0  # of all ranks together, in a typical step
        self.step = task.resume_step
        self._noted: set[str] = set()
        self._phase = phases.STARTING
        self._passes = 0
        self._said_s = -math.inf
        self._has_trained = False
        task.rank_dir.mkdir(parents=True, exist_ok=True)
        for name in (layout.METRICS_JSONL, "samples.jsonl"):  # of the same attempt: its commands were run by hand a second time
            with contextlib.suppress(FileNotFoundError):
                os.replace(task.rank_dir / name, task.rank_dir / f".{name}.before")

    def heartbeat(self, phase: str, *, done: float | None = None) -> None:
        """Replace heartbeat.json in one piece, so that a reader never sees half of it. `done`: the part of this phase, 0 to 1, where known."""
        beat = {
            "time": time.time(),
            "rank": self.task.rank,
            "pid": os.getpid(),
            "phase": phase,
            "step": self.step,
            "total_steps": self.total_steps,
            "step_tokens": self.step_tokens,
            "done": done,
            "passes": self._passes,
        }
        files.replace(self.task.rank_dir / layout.HEARTBEAT_JSON, json.dumps(beat).encode())
        self._phase, self._said_s = phase, time.monotonic()

    def sign(self) -> None:
        """A forward and backward pass is done: write a heartbeat, at most once in SIGN_S, so that a slow rank differs from one that hangs."""
        self._passes += 1
        if time.monotonic() - self._said_s >= SIGN_S:
            self.heartbeat(self._phase)

    def note(self, message: str) -> None:
        """Write a message once, to metrics.jsonl and standard output: a choice, a fallback, a limit."""
        if message in self._noted:
            return
        self._noted.add(message)
        print(f"note: {message}", flush=True)
        self._metric({"kind": "note", "time": time.time(), "attempt": self.task.attempt, "rank": self.task.rank, "message": message})

    def samples(self, line: dict[str, Any]) -> None:
        """Record which rows of the data this rank trains on in a step, before it counts: whoever dies after that has said it. Of a step that no
        later attempt builds on, and that is done again, the later line counts.
        """
        _append(self.task.rank_dir / "samples.jsonl", line)

    def train(self, line: dict[str, Any]) -> None:
        """Record a finished optimizer step: what it measured."""
        if not self._has_trained:
            self._has_trained = True  # and has imported everything, for those to do the same that wait (`waiting_rank`)
            files.replace(self.task.rank_dir / layout.MODULES_JSON, json.dumps(list(sys.modules)).encode())
            forget_earlier(self.task, layout.MODULES_JSON)
        self._metric({"kind": "train", "time": time.time(), "attempt": self.task.attempt, **line})

    def shares(self, step: int, change: Rebalancing) -> None:
        """From the next step on rows go to other ranks (rank 0 only)."""
        parts = ", ".join(f"{portion:.0%}" for portion in change.portions)
        where = {"attempt": self.task.attempt, "rank": self.task.rank, "step": step}
        values = {"speeds": [asdict(speed) for speed in change.speeds], "portions": list(change.portions)}
        message = f"after step {step}: {change.because}; the ranks take {parts} of the tokens"
        self._metric({"kind": "shares", "time": time.time(), **where, "message": message, **values})

    def saved(self, step: int, save_s: float, size_bytes: int, *, in_background: bool) -> None:
        """Record a checkpoint of this rank: how long it halted the training, and its size."""
        where = {"attempt": self.task.attempt, "rank": self.task.rank, "step": step}
        values = {"save_s": save_s, "checkpoint_bytes": size_bytes, "in_background": in_background}
        self._metric({"kind": "save", "time": time.time(), **where, **values})

    def evaluation(self, step: int, loss: float, pairs: Mapping[str, float]) -> dict[str, float | None]:
        """Record the loss over the held-out rows (rank 0 only): per token, or of a pair or a judged answer with its `margin`, `accuracy`, `kl`; as it is written."""
        where = {"attempt": self.task.attempt, "rank": self.task.rank, "step": step}
        values = {"eval_loss": loss, "eval_perplexity": None if pairs else perplexity(loss)}
        if pairs:
            values |= {"eval_margin": pairs["margin"], "eval_accuracy": pairs["accuracy"]}
        if "kl" in pairs:
            values["eval_kl"] = pairs["kl"]
        self._metric({"kind": "eval", "time": time.time(), **where, **values})
        return values

    def error(self, parts: Mapping[str, str | bool]) -> None:
        """error.json: why this rank stopped, in three parts; and `needs_launch` where its fix is a new training."""
        files.replace(self.task.rank_dir / layout.ERROR_JSON, json.dumps(parts, indent=2).encode())

    def _metric(self, line: dict[str, Any]) -> None:
        _append(self.task.rank_dir / layout.METRICS_JSONL, line)


def perplexity(loss: float) -> float | None:
    """exp(loss) of a mean loss per token in nats; None where that is too large for a float."""
    return math.exp(loss) if loss < 700 else None


def peak_memory_bytes(device: str) -> int:
    """Most memory this process ever held: reserved by torch on the GPU, else resident in RAM (Linux reports KiB)."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
