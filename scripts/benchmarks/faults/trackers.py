"""What trackers that are installed here have got of a run, read back from their own files. TensorBoard's event files by TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homelab.controller.run.paths import RunPaths

Row = tuple[int, dict[str, float]]
_BLOCK_BYTES, _HEADER_BYTES, _FILE_HEADER_BYTES = 32768, 7, 7  # of the record format of LevelDB's log, in which W&B writes
_FULL, _FIRST, _LAST = 1, 2, 4


def installed() -> list[str]:
    """The trackers that this can read back, of those whose packages are here."""
    return ["tensorboard", *(name for name in ("trackio", "wandb") if importlib.util.find_spec(name))]


def keep_below(folder: Path) -> None:
    """From now on they write here, and speak to no server."""
    for name in ("trackio", "wandb"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(folder / "wandb"), TRACKIO_DIR=str(folder / "trackio"))


def read(tracker: str, folder: Path, paths: RunPaths) -> list[Row]:
    """(step, {tag: value}) in the order in which they were written."""
    if tracker == "tensorboard":
        return _tensorboard(paths.event_files)
    return _trackio(folder / "trackio") if tracker == "trackio" else list(_wandb(folder / "wandb", paths.name))


def _tensorboard(files: Path) -> list[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(files), size_guidance={"scalars": 0})
    reader.Reload()
    values: dict[tuple[int, bool], dict[str, float]] = {}
    for tag in reader.Tags()["scalars"]:
        for point in reader.Scalars(tag):
            row = values.setdefault((point.step, tag.startswith("eval/")), {})
            assert tag not in row, f"TensorBoard has {tag} of step {point.step} twice"
            row[tag] = point.value
    return [(step, row) for (step, _), row in sorted(values.items())]


def _trackio(folder: Path) -> list[Row]:
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as base:
        return [(step, json.loads(metrics)) for step, metrics in base.execute("select step, metrics from metrics order by id")]


def _wandb(folder: Path, run: str) -> Iterator[Row]:
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.rglob(f"run-{run}.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row: dict[str, Any] = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                yield int(row.pop("step")), {tag: value for tag, value in row.items() if not tag.startswith("_")}


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER_BYTES, b""
    while place + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += _HEADER_BYTES
        parts = (b"" if kind in (_FULL, _FIRST) else parts) + data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield parts
