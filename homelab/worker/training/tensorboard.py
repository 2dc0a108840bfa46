"""Curves for TensorBoard, written by rank 0 into the run's folder on the head; of a recovered run every step once, wherever the head was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homelab.worker.checkpoints.curves import Curves
from homelab.worker.runtime.metrics_recorder import perplexity

_TRAIN = ("loss", "perplexity", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "communication_s")


class TensorBoard:
    """Steps of earlier attempts are written again into a new file, and older files are removed: another node may have been the head then.

    Where the checkpoint does not carry the whole curve (one of an older homelab), the older files stay, and TensorBoard gets the
    step from which their values no longer count. TensorBoard is imported with the first value, because that costs about a second.
    """

    def __init__(self, folder: Path, curves: Curves, resume_step: int) -> None:
        self.folder = folder
        self._curves = curves
        self._resume_step = resume_step
        self._writer: Any = None

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """Add one point per name; None is left out."""
        writer = self._opened()
        for name, value in values.items():
            if value is not None:
                writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush what is still in memory; an attempt that had no step to do leaves the curves of those before it."""
        if self._curves.before:
            self._opened()
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        if self._writer is not None:
            return self._writer
        from torch.utils.tensorboard import SummaryWriter

        if not self._curves.is_whole:
            self._writer = SummaryWriter(str(self.folder), purge_step=self._resume_step + 1)
            return self._writer
        older = list(self.folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(self.folder))
        for line in self._curves.before:
            self._again(line)
        self._writer.flush()
        for file in older:
            file.unlink(missing_ok=True)
        return self._writer

    def _again(self, line: dict[str, Any]) -> None:
        """One step of an earlier attempt, with its own time. All of its values are one record, because there may be a hundred thousand."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {f"eval/{name}": line.get(f"eval_{name}") for name in ("loss", "perplexity")}
        if line["kind"] == "train":
            figures = {**line, "perplexity": perplexity(line["loss"])}
            values = {f"train/{name}": figures.get(name) for name in _TRAIN}
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._writer._get_file_writer().add_summary(Summary(value=points), line["step"], line.get("time"))
