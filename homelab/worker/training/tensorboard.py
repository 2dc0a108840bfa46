"""Curves for TensorBoard, written by rank 0 into the run's folder on the head; of a recovered run every step once, wherever the head was."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

from homelab.worker.checkpoints.curves import Curves
from homelab.worker.runtime.metrics_recorder import perplexity

_TRAIN = ("loss", "perplexity", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "communication_s")
_EVAL = ("eval/loss", "eval/perplexity")


class TensorBoard:
    """Steps of earlier attempts are written again into a new file, and older files are removed: another node may have been the head then.
    The figures of pairs, which no checkpoint carries, are taken out of the older files of this node.

    Where the checkpoint does not carry the whole curve (one of an older homelab), the older files stay, and TensorBoard gets the
    step from which their values no longer count.

    A thread writes, from the first value on: the import of TensorBoard takes a second, and the other ranks would wait for it, and for the
    steps before, in every recovery.
    """

    def __init__(self, folder: Path, curves: Curves, resume_step: int) -> None:
        self.folder = folder
        self._curves = curves
        self._resume_step = resume_step
        self._writer: Any = None
        self._points: queue.SimpleQueue[tuple[int, float, dict[str, float | None]] | None] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="tensorboard")

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """Add one point per name; None is left out. Raises what has ended the thread: a disk that is full."""
        if self._fault is not None:
            raise self._fault
        self._begin()
        self._points.put((step, time.time(), values))

    def close(self) -> None:
        """Flush what is still in memory; an attempt that had no step to do leaves the curves of those before it."""
        if any(self._curves.before):
            self._begin()
        if self._thread.ident is not None:
            self._points.put(None)
            self._thread.join()
            if self._fault is not None:
                raise self._fault

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _write(self) -> None:
        try:
            writer = self._opened()
            while (point := self._points.get()) is not None:
                step, at_s, values = point
                for name, value in values.items():
                    if value is not None:
                        writer.add_scalar(name, value, step, at_s)
            writer.close()
        except Exception as error:  # noqa: BLE001 - the training raises it
            self._fault = error

    def _opened(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if not self._curves.is_whole:
            return SummaryWriter(str(self.folder), purge_step=self._resume_step + 1)
        older = sorted(self.folder.glob("events.out.tfevents.*"))
        figures = self._of_pairs(older) if self._curves.of_pairs else []
        self._writer = SummaryWriter(str(self.folder))
        for line in self._curves.before:
            self._again(line)
        for step, time_s, points in figures:
            self._writer._get_file_writer().add_summary(points, step, time_s)
        self._writer.flush()
        for file in older:
            file.unlink(missing_ok=True)
        return self._writer

    def _of_pairs(self, older: list[Path]) -> list[tuple[int, float, Any]]:
        """(step, its time, its Summary) up to the step of the checkpoint, of what older files have and curves have not."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.summary_pb2 import Summary

        found: dict[tuple[int, str], tuple[float, Any]] = {}
        for file in older:
            for event in LegacyEventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    if event.step <= self._resume_step and value.tag.removeprefix("train/") not in _TRAIN and value.tag not in _EVAL:
                        found[event.step, value.tag] = event.wall_time, value
        return [(step, time_s, Summary(value=[value])) for (step, _), (time_s, value) in sorted(found.items(), key=lambda item: item[0])]

    def _again(self, line: dict[str, Any]) -> None:
        """One step of an earlier attempt, with its own time. All of its values are one record, because there may be a hundred thousand."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {tag: line.get(tag.replace("/", "_")) for tag in _EVAL}
        if line["kind"] == "train":
            figures = {**line, "perplexity": None if self._curves.of_pairs else perplexity(line["loss"])}
            values = {f"train/{name}": figures.get(name) for name in _TRAIN}
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._writer._get_file_writer().add_summary(Summary(value=points), line["step"], line.get("time"))
