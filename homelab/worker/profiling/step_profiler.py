"""torch.profiler around some steps of one rank. It never ends or changes the training: what fails becomes a note of the run.

the step before      the profiler warms up (on a card its start takes long)
the steps            phases and modules are ranges, exchanges are noted, the balancer does not learn from their times
after the last       the raw trace goes to the disk, and a process of its own makes the profile's files of it (`summarise`)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from homelab.shared.protocol import files, phases, profile_files
from homelab.worker.errors import first_words
from homelab.worker.profiling import raw_profile
from homelab.worker.profiling.exchange_log import ExchangeLog
from homelab.worker.profiling.module_ranges import ModuleRanges
from homelab.worker.profiling.replaced import Replaced
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task

_USUAL_FROM = 2  # steps of an attempt that are not usual: connecting, and DDP's new order of its buckets
_LONGEST_SUMMARY_S = 600.0


class StepProfiler:
    """Profiles the steps from `first` to `last` of this rank, once."""

    def __init__(self, trainer: Any, task: Task, recorder: Recorder, first: int, last: int) -> None:
        self._trainer, self._task, self._recorder = trainer, task, recorder
        self._first, self._last = first, last
        self._folder = task.run_dir / profile_files.rank_folder(task.rank)
        self._partial = partial_folder(task)
        self._watching = Replaced()  # from the start of the attempt to the last profiled step
        self._inside = Replaced()  # within the profiled steps
        self._modules = ModuleRanges(trainer.model)
        self._exchanges = ExchangeLog(task.world_size, task.nodes.count(task.node) if task.strategy == "hsdp" else task.world_size)
        self._profiler: Any = None
        self._summing: threading.Thread | None = None
        self._held_bytes = 0
        self._usual_s: list[float] = []
        self._steps: list[dict[str, Any]] = []

    def install(self) -> None:
        """From now on the trainer's steps are watched, until the last one to profile is done."""
        trainer = self._trainer
        self._watching.method(trainer, "get_batch_samples", self._input)
        self._watching.method(trainer, "step_done", self._step_done)
        if self._first == trainer.state.global_step + 1:
            with self._harmless("while the profiler started"):
                self._warm_up()

    def _input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step begins with its rows."""
        step = self._trainer.state.global_step + 1
        with self._harmless("while the profiler started"):
            if step == self._first - 1:
                self._warm_up()
            elif self._profiler is not None and self._first <= step <= self._last:
                self._begin(step)
        if self._steps:
            with record_function(profile_files.INPUT):
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    def _warm_up(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._task.device == "cuda" else [])]
        plan = schedule(wait=0, warmup=1, active=self._last - self._first + 1, repeat=1)
        self._profiler = profile(activities=activities, schedule=plan, profile_memory=True)
        self._profiler.start()

    def _begin(self, step: int) -> None:
        if not self._steps:
            self._held_bytes = held_bytes(self._trainer.model, self._trainer.optimizer, self._task.device)
            self._modules.add()
            self._exchanges.watch(self._inside, self._trainer.strategy)
            self._name_phases()
        self._profiler.step()
        self._steps.append({"step": step, "begin_ns": time.time_ns()})

    def _name_phases(self) -> None:
        trainer, inside = self._trainer, self._inside

        def named(owner: Any, method: str, name: str) -> None:
            def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                with record_function(name):
                    return original(*args, **kwargs)

            inside.method(owner, method, around)

        named(trainer, "compute_loss", profile_files.FORWARD)
        named(trainer.accelerator, "backward", profile_files.BACKWARD)
        named(trainer.clock, "gradients_reduced", profile_files.REDUCTION)
        named(trainer, "_clip_grad_norm", profile_files.OPTIMIZER)
        named(trainer.optimizer, "step", profile_files.OPTIMIZER)
        inside.method(trainer.clock, "gradients_ready", self._ready)
        # A profiled step is slower than others: rows are not to move to other ranks for it, nor is the next plan to believe it.
        inside.method(trainer.meter, "observe", lambda original, *args: None)

    def _ready(self, original: Callable[[], None]) -> None:
        original()
        self._steps[-1]["ready_ns"] = time.time_ns()

    def _step_done(self, original: Callable[[], None]) -> None:
        """The optimizer has stepped."""
        original()
        trainer = self._trainer
        step = trainer.state.global_step
        if not self._steps:
            if step > self._task.resume_step + _USUAL_FROM:
                self._usual_s.append(trainer.step_s)
        else:
            self._steps[-1] |= {"end_ns": time.time_ns(), "step_s": trainer.step_s, "communication_s": trainer.clock.communication_s}
        if step >= self._last:
            with self._harmless("while the trace was written"):
                self._end()
            self._leave()

    def _end(self) -> None:
        """The raw trace goes to the disk, and the rest is done beside the training."""
        if self._profiler is None or not self._steps:
            return
        self._recorder.heartbeat(phases.SAVING)  # no step comes for a while
        self._profiler.stop()
        self._put_back()
        self._partial.mkdir(parents=True)
        raw_profile.check_room(self._partial, len(self._profiler.profiler.kineto_results.events()))
        raw = raw_profile.RawProfile(
            run=str(self._task.run["name"]), attempt=self._task.attempt, rank=self._task.rank, node=self._task.node, device=self._task.device,
            strategy=self._task.strategy, world_size=self._task.world_size, torch=torch.__version__, held_bytes=self._held_bytes,
            usual_step_s=statistics.median(self._usual_s) if self._usual_s else None, steps=self._steps,
            exchanges=[asdict(entry) for entry in self._exchanges.entries if entry.end_ns], modules=dict(self._modules.sources()),
        )  # fmt: skip
        self._profiler.export_chrome_trace(str(self._partial / raw_profile.TRACE))
        files.write_json(self._partial / raw_profile.MEASURED, asdict(raw))
        self._profiler = None
        self._summing = threading.Thread(target=self._sum_up, daemon=True)
        self._summing.start()

    def finish(self) -> None:
        """The run is over: wait until the profile's files are whole."""
        with self._harmless("while the run ended"):
            self._stop()
        self._leave()
        if self._summing is not None:
            self._summing.join()

    def _sum_up(self) -> None:
        """Wait for the process that makes the files, and say what has become of it."""
        words = [sys.executable, "-m", "homelab.worker.profiling.summarise", str(self._partial), str(self._folder)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_LONGEST_SUMMARY_S,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._give_up("while it was summed up", first_words(error))
            return
        if done.returncode:
            self._give_up(
                "while it was summed up", (done.stderr.decode(errors="replace").strip().splitlines() or ["it ended without a word"])[-1]
            )
        else:
            self._recorder.note(f"steps {self._first} to {self._last} are profiled: {self._folder}")

    def _leave(self) -> None:
        self._put_back()
        self._watching.put_back()

    def _put_back(self) -> None:
        self._inside.put_back()
        self._modules.remove()

    def _stop(self) -> None:
        if self._profiler is not None:
            started, self._profiler = self._profiler, None
            started.stop()

    @contextlib.contextmanager
    def _harmless(self, moment: str) -> Iterator[None]:
        """Whatever fails here ends the profile and not the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a profile that fails ends no training
            words = error.strerror or str(error) if isinstance(error, OSError) else first_words(error)
            with contextlib.suppress(Exception):
                self._stop()
            self._leave()
            self._give_up(moment, words)

    def _give_up(self, moment: str, words: str) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # of a disk that is full
            self._recorder.note(
                f"no profile of rank {self._task.rank}, the training continues: {moment}: {words}. "
                f"where: node {self._task.node}, {self._folder}. fix: {_fix(self._folder, words)}"
            )


def partial_folder(task: Task) -> Path:
    """Where this rank's profile is until it is whole."""
    folder = task.run_dir / profile_files.rank_folder(task.rank)
    return folder.parent / f".{folder.name}.partial"


def _fix(folder: Path, words: str) -> str:
    if raw_profile.is_no_room(words):
        return f"make room (df -h {shlex.quote(str(folder.parent.parent))}), then launch again with --profile"
    return "launch again with other steps: --profile FIRST-LAST"


def held_bytes(model: torch.nn.Module, optimizer: Any, device: str) -> int:
    """Bytes of weights, buffers, gradients and the optimizer's state on a processor, each storage once; 0 on a card.

    The profiler tells only of memory that changes after its start. On a card it says what torch's allocator has given out, all in all.
    """
    if device != "cpu":
        return 0
    storages = {}
    for tensor in _tensors(model, optimizer):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
