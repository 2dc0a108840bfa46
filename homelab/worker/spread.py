"""The checkpoint to go on from, on every node: who lacks it, or holds a damaged one, receives it from a peer over the process group.

    look    before the ranks meet: the first rank of each node verifies its node's own copy (tens of GB take minutes to read)
    bring   when they have met: everybody says what it holds, and the lowest rank with a whole copy sends it to the first ranks of
            the nodes without, in chunks. They write it beside its place and rename it when every byte is there, as `checkpoint.write` does

Copies of one step that are whole and hold different weights cannot both be right: `replicas` says which is, and who holds another one is
a node without.

The chunks go through a gloo group also where the training's own is NCCL: they come from a disk and go to one, and the cards are full
of the model. No collective takes longer than a chunk, so that a sign of life comes with each; ranks with no part in it wait at the
store, as long as there is progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker import checkpoint, fence, ranks, replicas, room, unloadable
from homelab.worker.errors import TrainingError, WorkerError
from homelab.worker.metrics import Recorder
from homelab.worker.task import Task

CHUNK_BYTES = 8 << 20
_AHEAD = 2  # chunks on their way while others are read, hashed and written
_SYNC_BYTES = 256 << 20  # so that the sync at the end of a file of tens of GB is a short one, too
_HAS_NO_PART, _HOLDS, _LACKS = 0.0, 1.0, 2.0
_SIGN_S = 1.0


def look(task: Task) -> WorkerError | None:
    """What is wrong with this node's own copy of the checkpoint to go on from; None where it is whole, and for all but the first rank."""
    if task.resume_step == 0 or task.local_rank != 0:
        return None
    folder = _place(task)
    try:
        checkpoint.verify(folder, task.recipe_hash)
        unloadable.refuse(folder, task.run_dir.name)
    except WorkerError as fault:
        return fault
    except OSError as error:
        return WorkerError(
            f"the checkpoint cannot be read: {error.strerror}",
            where=error.filename or str(folder),
            hint="homelab recover",
        )
    return None


def bring(task: Task, fault: WorkerError | None, recorder: Recorder) -> Path | None:
    """The folder to go on from, whole on this node's disk; None for a start from nothing. `fault` is what `look` found.

    All ranks call it, after `ranks.connect`. Raises `fault` where no node of the attempt holds a whole copy, WorkerError where this
    node's disk cannot take it or what arrives is damaged; then the attempt ends on every rank.
    """
    if task.resume_step == 0:
        return None
    folder = _place(task)
    if not dist.is_initialized():
        if fault:
            raise unloadable.set_aside(fault, task)
        return folder
    part = _HAS_NO_PART if task.local_rank != 0 else _LACKS if fault else _HOLDS
    mine = [part, float(_size_bytes(folder)), *replicas.numbers(_digest(folder))] if part == _HOLDS else [part, 0.0, *replicas.numbers("")]
    everyone = ranks.gather(mine)
    holders = {rank: str(its[2:]) for rank, its in enumerate(everyone) if its[0] == _HOLDS}
    # The controller asks also those that take no part now; else the ranks decide among themselves.
    wanted = str(replicas.numbers(task.plan.get("resume_digest") or ""))
    right = wanted if wanted in holders.values() else replicas.right(holders)
    odd = [rank for rank, digest in holders.items() if digest != right]
    holders = {rank: digest for rank, digest in holders.items() if digest == right}
    lacking = sorted([*odd, *(rank for rank, its in enumerate(everyone) if its[0] == _LACKS)])
    if not lacking:
        return folder
    if not holders:
        raise unloadable.set_aside(fault, task) if fault else WorkerError(
            f"no node of this attempt holds the checkpoint of step {task.resume_step} whole",
            where=str(folder),
            hint="homelab recover",
        )
    source = min(holders)
    size_bytes = int(everyone[source][1])
    if task.rank in odd:
        fault = WorkerError(f"its weights or its optimizer are not those of {_nodes(task, holders)}", where=str(folder), hint="homelab recover")
    if task.rank in lacking:
        assert fault is not None
        if folder.exists():
            recorder.note(
                f"the checkpoint of step {task.resume_step} on {task.node} is set aside: {fault.message} ({fault.where})"
            )
        room.make(task.checkpoints_dir, task.resume_step, size_bytes, int(task.section("checkpoint")["keep"]))
    ranks.gather([1.0])  # who has no room has ended by now, and everybody with it, before anything is sent
    # Only its members make it. Else torch would have all others split the NCCL group beside it, which is bound to a card, and they would
    # wait there for the members for ever (distributed_c10d.py of 2.13, _new_process_group_helper; pytorch issue 145376).
    group = dist.new_group([source, *lacking], timeout=ranks.patience(), backend="gloo", use_local_synchronization=True)
    progress = _Progress(recorder, size_bytes)
    began_s = time.perf_counter()
    if task.rank == source:
        _send(folder, group, source, progress)
    elif task.rank in lacking:
        _receive(task, folder, group, source, progress)
    ranks.wait_while_moving("spread", task.world_size, lambda: recorder.heartbeat("loading"))
    if task.rank == source:
        took_s = time.perf_counter() - began_s
        to = _nodes(task, lacking)
        rate = f"{room.words(round(size_bytes / took_s))}/s"
        recorder.note(
            f"the checkpoint of step {task.resume_step} went from {task.node} to {to}: {room.words(size_bytes)} in {took_s:.1f} s, {rate}"
        )
    return folder


def _send(folder: Path, group: Any, source: int, progress: _Progress) -> None:
    """The manifest's length, the manifest, then the bytes of each file in its order."""
    text = (folder / checkpoint.MANIFEST).read_bytes()
    dist.broadcast(torch.tensor([len(text)]), source, group)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, group)
    for name, facts in json.loads(text)["files"].items():
        with (folder / name).open("rb", buffering=0) as file:

            def read(chunk: torch.Tensor, path: Path = folder / name, file: Any = file) -> None:
                if file.readinto(memoryview(chunk.numpy())) != len(chunk):
                    raise TrainingError(
                        "a file of the checkpoint became shorter while it was sent",
                        where=str(path),
                        hint="homelab recover",
                    )

            _stream(group, source, facts["bytes"], before=read, after=progress.moved)


def _receive(task: Task, folder: Path, group: Any, source: int, progress: _Progress) -> None:
    """What `_send` sends, under a partial name until all of it is there, compared with the manifest and synced."""
    root, step = task.checkpoints_dir, task.resume_step
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, source, group)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, source, group)
    partial = root / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        for name, facts in json.loads(text.numpy().tobytes())["files"].items():
            assert Path(name).name == name, name
            with _Arriving(partial / name) as file:

                def write(chunk: torch.Tensor, file: _Arriving = file) -> None:
                    file.write(chunk)
                    progress.moved(chunk)

                _stream(group, source, facts["bytes"], after=write)
            if file.sha256 != facts["sha256"]:
                raise TrainingError(
                    f"the checkpoint of step {step} arrived damaged from {_node(task, source)}: the sha256 of {name} differs",
                    where=f"node {task.node}, {root}",
                    hint="homelab recover; where it comes back, test the memory of both nodes (memtester) and the cable between them",
                )
        with _Arriving(partial / checkpoint.MANIFEST) as file:
            file.write(text)
        fence.check(task.run_dir, task.attempt)
        checkpoint.put(partial, root, step, is_corrupt=folder.exists())
    except OSError as error:
        raise checkpoint.unwritable(root, step, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stream(
    group: Any,
    source: int,
    size_bytes: int,
    *,
    before: Callable[[torch.Tensor], None] | None = None,
    after: Callable[[torch.Tensor], None],
) -> None:
    """One file, chunk by chunk: `before` fills what is sent, `after` sees what has gone or come. Some are always on their way."""
    on_the_way: deque[tuple[Any, torch.Tensor]] = deque()

    def land(most: int) -> None:
        while len(on_the_way) > most:
            work, chunk = on_the_way.popleft()
            work.wait()
            after(chunk)

    for size in _chunk_sizes(size_bytes):
        chunk = torch.empty(size, dtype=torch.uint8)
        if before is not None:
            before(chunk)
        on_the_way.append((dist.broadcast(chunk, source, group, async_op=True), chunk))
        land(_AHEAD)
    land(0)


def _chunk_sizes(size_bytes: int) -> Iterable[int]:
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size_bytes - start)


class _Arriving:
    """A file that is written and hashed as it comes, and on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self._unsynced_bytes = 0
        self._pool = ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self.sha256 = ""

    def __enter__(self) -> _Arriving:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        with self._file:
            if error[0] is None:
                if self._sync is not None:
                    self._sync.result()  # an error of the disk is told once
                os.fsync(self._file.fileno())
        self.sha256 = self._hash.hexdigest()

    def write(self, chunk: torch.Tensor) -> None:
        """Append it. Raises OSError."""
        view = memoryview(chunk.numpy())
        self._hash.update(view)
        while len(view):
            view = view[self._file.write(view) :]
        self._unsynced_bytes += len(chunk)
        if self._unsynced_bytes >= _SYNC_BYTES:
            if self._sync is not None:
                self._sync.result()
            self._sync = self._pool.submit(os.fdatasync, self._file.fileno())
            self._unsynced_bytes = 0


class _Progress:
    """Once a second: this rank's heartbeat with the part that is done, and a sign for those who wait."""

    def __init__(self, recorder: Recorder, total_bytes: int) -> None:
        self._recorder, self._total_bytes = recorder, total_bytes
        self._done_bytes, self._said_s = 0, -_SIGN_S

    def moved(self, chunk: torch.Tensor) -> None:
        """This chunk has gone, or is written."""
        self._done_bytes += len(chunk)
        if time.monotonic() - self._said_s >= _SIGN_S:
            self._said_s = time.monotonic()
            self._recorder.heartbeat("fetching", done=self._done_bytes / max(1, self._total_bytes))
            ranks.sign("spread")


def _place(task: Task) -> Path:
    return task.checkpoints_dir / checkpoint.folder_name(task.resume_step)


def _size_bytes(folder: Path) -> int:
    manifest = checkpoint.read_manifest(folder)
    assert manifest is not None, "it was verified"
    return sum(int(facts["bytes"]) for facts in manifest["files"].values())


def _digest(folder: Path) -> str:
    manifest = checkpoint.read_manifest(folder)
    assert manifest is not None, "it was verified"
    return replicas.state_digest({name: facts["sha256"] for name, facts in manifest["files"].items()})


def _nodes(task: Task, numbers: Iterable[int]) -> str:
    return ", ".join(sorted(_node(task, rank) for rank in numbers))


def _node(task: Task, rank: int) -> str:
    return next(entry["node"] for entry in task.plan["ranks"] if entry["rank"] == rank)
