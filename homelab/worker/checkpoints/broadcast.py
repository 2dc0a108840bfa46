"""The checkpoint to resume from, on every node: a node that lacks it or holds a damaged one receives it from a peer over the process group.

    verify_own  before the ranks meet: the first rank of each node verifies its node's own copy (tens of GB take minutes to read)
    fetch       when they have met: every rank says what it holds, and the lowest rank with a whole copy sends it to the first ranks of the
                nodes without, in chunks. They write it beside its place and rename it when every byte is there, as `store.write` does

Copies of one step that are whole and hold different weights cannot both be right: `checkpoint_copies` says which is, and a node with
another one counts as a node without.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from homelab.shared.protocol import checkpoint_copies, checkpoint_holders, manifest, phases
from homelab.shared.protocol.checkpoint_holders import REPLICATED, WHOLE
from homelab.worker.checkpoints import checkpoint_folder, disk_space, fencing, load_check
from homelab.worker.errors import TrainingError, WorkerError, size_words
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task

CHUNK_BYTES = 8 << 20
_AHEAD = 2  # chunks on their way while others are read, hashed and written
_SYNC_BYTES = 256 << 20  # sync so often, because one sync at the end of a file of tens of GB would take long
_SIGN_S = 1.0


class _Copy(NamedTuple):
    """What a rank says of its node's copy. `has_part`: it speaks for its node; `is_whole`: the node needs none."""

    has_part: bool
    is_whole: bool
    size_bytes: int = 0
    digest: str = ""


def verify_own(task: Task) -> WorkerError | None:
    """What is wrong with this node's own copy of the checkpoint to go on from; None where it is whole, and for all but the first rank."""
    if task.resume_step == 0 or not task.is_keeper:
        return None
    folder = _place(task)
    try:
        checkpoint_folder.verify(folder, task.recipe_hash)
        load_check.refuse(folder, task.run_dir.name)
    except WorkerError as fault:
        return fault
    except OSError as error:
        return WorkerError(f"the checkpoint cannot be read: {error.strerror}", where=error.filename or str(folder), hint="homelab recover")
    return None


def fetch(task: Task, fault: WorkerError | None, recorder: Recorder) -> Path | None:
    """The folder to resume from, whole on this node's disk; None for a start from nothing. `fault` is what `verify_own` returned.

    All ranks call it, after `process_group.connect`. Raises `fault` where no node of the attempt holds a whole copy, WorkerError where
    this node's disk cannot take it or what arrives is damaged; then the attempt ends on every rank.
    """
    if task.resume_step == 0:
        return None
    folder = _place(task)
    _refuse_shards(task, folder)
    if not dist.is_initialized():
        if fault:
            raise load_check.set_aside(fault, task)
        return folder
    own = _Copy(task.is_keeper, task.is_keeper and fault is None)
    if own.is_whole:
        own = own._replace(size_bytes=_size_bytes(folder), digest=_digest(folder))
    everyone = [_Copy(*json.loads(text)) for text in process_group.exchange("checkpoint", json.dumps(own))]
    digests = {rank: copy.digest for rank, copy in enumerate(everyone) if copy.is_whole}
    # The controller also asks nodes that take no part now. Without its answer the ranks decide.
    expected = task.plan.get("resume_digest") or ""
    right = expected if expected in digests.values() else checkpoint_copies.right(digests)
    odd = [rank for rank, digest in digests.items() if digest != right]
    holders = [rank for rank, digest in digests.items() if digest == right]
    if not holders:
        if fault:
            raise load_check.set_aside(fault, task)
        message = f"no node of this attempt holds the complete checkpoint of step {task.resume_step}"
        raise WorkerError(message, where=str(folder), hint="homelab recover")
    team = [rank for rank, copy in enumerate(everyone) if copy.has_part]
    moves = checkpoint_holders.copies(dict.fromkeys(holders, WHOLE), team, to_all=True)
    if not moves:
        return folder
    source, receivers = moves[0].source, [move.target for move in moves]
    size_bytes = everyone[source].size_bytes
    if task.rank in odd:
        fault = WorkerError(
            f"its weights or its optimizer state differ from those of {_nodes(task, holders)}", where=str(folder), hint="homelab recover"
        )
    if task.rank in receivers:
        assert fault is not None
        if folder.exists():
            recorder.note(f"the checkpoint of step {task.resume_step} on {task.node} is set aside: {fault.message} ({fault.where})")
        disk_space.make(task.checkpoints_dir, task.resume_step, size_bytes, task.checkpoint.keep, task.checkpoint.is_kept)
    _spread(task, source, receivers, size_bytes, recorder)
    return folder


def _refuse_shards(task: Task, folder: Path) -> None:
    """Raises WorkerError where a checkpoint is not the same on every node: a strategy that shards its state loads it by itself."""
    if checkpoint_holders.layout_of(task.plan) != REPLICATED or manifest.shards(folder) is not None:
        raise WorkerError(
            f"the checkpoint of step {task.resume_step} is in shards, but strategy {task.strategy} of this worker loads only one that is the same on every node",
            where=str(folder),
            hint="set [parallel] strategy in the recipe to the one that saved it, then homelab recover",
        )


def _spread(task: Task, source: int, receivers: list[int], size_bytes: int, recorder: Recorder) -> None:
    """Send the checkpoint from rank `source` to the ranks `receivers`. All ranks call it."""
    folder = _place(task)
    process_group.gather([1.0])  # a rank without room ends all ranks before anything is sent
    # Only its members make it. Else torch would have all others split the NCCL group beside it, which is bound to a card, and they would
    # wait there for the members for ever (distributed_c10d.py of 2.13, _new_process_group_helper; pytorch issue 145376).
    group = dist.new_group([source, *receivers], timeout=process_group.patience(), backend="gloo", use_local_synchronization=True)
    progress = _Progress(recorder, size_bytes)
    start_s = time.perf_counter()
    if task.rank == source:
        _send(folder, group, source, progress)
    elif task.rank in receivers:
        _receive(task, folder, group, source, progress)
    process_group.wait_while_moving("spread", task.world_size, lambda: recorder.heartbeat(phases.LOADING))
    # torch names later groups by how many a rank has (_hash_ranks_to_str of 2.13), which must not differ between ranks
    if group is not None:
        dist.destroy_process_group(group)
    if task.rank == source:
        took_s = time.perf_counter() - start_s
        rate = f"{size_words(round(size_bytes / took_s))}/s"
        recorder.note(
            f"the checkpoint of step {task.resume_step} went from {task.node} to {_nodes(task, receivers)}: {size_words(size_bytes)}"
            f" in {took_s:.1f} s, {rate}"
        )


def _send(folder: Path, group: Any, source: int, progress: _Progress) -> None:
    """The manifest's length, the manifest, then the bytes of each file in its order."""
    text = (folder / manifest.MANIFEST).read_bytes()
    dist.broadcast(torch.tensor([len(text)]), source, group)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, group)
    for name, facts in json.loads(text)["files"].items():
        with (folder / name).open("rb", buffering=0) as file:

            def read(chunk: torch.Tensor, path: Path = folder / name, file: Any = file) -> None:
                if file.readinto(memoryview(chunk.numpy())) != len(chunk):
                    raise TrainingError(
                        "a file of the checkpoint became shorter while it was sent", where=str(path), hint="homelab recover"
                    )

            _stream(group, source, facts["bytes"], before=read, after=progress.moved)


def _receive(task: Task, folder: Path, group: Any, source: int, progress: _Progress) -> None:
    """Receive what `_send` sends: under a partial name until it is complete, compared with the manifest and synced."""
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
                    f"the checkpoint of step {step} arrived damaged from {task.nodes[source]}: the sha256 of {name} differs",
                    where=f"node {task.node}, {root}",
                    hint="homelab recover; if it happens again, test the memory of both nodes (memtester) and the cable between them",
                )
        with _Arriving(partial / manifest.MANIFEST) as file:
            file.write(text)
        fencing.check(task.run_dir, task.attempt)
        checkpoint_folder.put(partial, root, step, is_corrupt=folder.exists())
    except OSError as error:
        raise checkpoint_folder.unwritable(root, step, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stream(
    group: Any, source: int, size_bytes: int, *, before: Callable[[torch.Tensor], None] | None = None, after: Callable[[torch.Tensor], None]
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
                    self._sync.result()  # raises an error of the disk once
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
        """Count a chunk that was sent or written."""
        self._done_bytes += len(chunk)
        if time.monotonic() - self._said_s >= _SIGN_S:
            self._said_s = time.monotonic()
            self._recorder.heartbeat(phases.FETCHING, done=self._done_bytes / max(1, self._total_bytes))
            process_group.sign("spread")


def _place(task: Task) -> Path:
    return task.checkpoints_dir / manifest.folder_name(task.resume_step)


def _size_bytes(folder: Path) -> int:
    content = checkpoint_folder.read_manifest(folder)
    assert content is not None, "it was verified"
    return sum(int(facts["bytes"]) for facts in content["files"].values())


def _digest(folder: Path) -> str:
    return checkpoint_copies.state_digest(manifest.digests(folder))


def _nodes(task: Task, ranks: Iterable[int]) -> str:
    return ", ".join(sorted(task.nodes[rank] for rank in ranks))
