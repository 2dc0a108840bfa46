"""TensorBoard's event files of a run, written on the controller: each step once, also for a TensorBoard that is looking on.

The values are plain scalars of one event per step. TensorBoard is imported with the first file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homelab.controller.features.track.points import Key, TrackedPoint, first_changed

REQUIREMENT = "tensorboard>=2.18"


class EventFiles:
    """The files in `folder`, which hold nothing else: what lies there of an earlier process is replaced as a whole.

    What a recovery changes is withdrawn by a session start at its first step: TensorBoard drops what it has from there on.
    Raises OSError where the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("events.out.tfevents.*"):
            file.unlink(missing_ok=True)
        self._writer: Any = EventFileWriter(str(folder))
        self._sent: dict[Key, int] = {}
        self._start(0)  # for a TensorBoard that still has the values of the older files

    def bring(self, points: Sequence[TrackedPoint]) -> int:
        """Write what is new or changed; the number of points."""
        changed = first_changed(points, self._sent)
        if changed is not None:
            self._start(changed)
            self._sent = {key: attempt for key, attempt in self._sent.items() if key[1] < changed}
        new = [point for point in points if point.key not in self._sent]
        for point in new:
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()])
            self._writer.add_event(self._event(step=point.step, wall_time=point.time, summary=summary))
            self._sent[point.key] = point.attempt
        if new or changed is not None:
            self._writer.flush()
        return len(new)

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()

    def _start(self, step: int) -> None:
        self._writer.add_event(self._event(step=step, session_log=self._session(status=self._session.START)))
