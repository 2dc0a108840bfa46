"""Sends and receives data files and checkpoints. Each is verified, and gets its final name only when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tarfile
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.storage import program_checkpoints
from homelab.shared.protocol import checkpoint_holders, files, layout, manifest
from homelab.shared.protocol.checkpoint_messages import Checkpoints, HasFile, Manifest, Shards
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.message import Done, fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, BinaryIO

    from homelab.shared.protocol.checkpoint_messages import CheckpointRequest, CheckpointsRequest, FileRequest


def has_file(request: FileRequest) -> HasFile:
    """Is the shipped file here with the content it was sent with, or with another one?

    The file is read to its end: an edit of the copy on one node keeps its name, and often its size.
    """
    path = data_path(request.workdir, fields(request))
    try:
        is_same = os.path.isfile(path) and file_sha256(path) == request.sha256  # a pipe would be waited for
    except OSError:  # it cannot be read, and is sent again
        is_same = False
    return HasFile(found=is_same, differs=not is_same and os.path.lexists(path))


def data_path(workdir: str, entry: Mapping[str, Any]) -> str:
    """Where a shipped file lies on this node (`homelab.shared.protocol.layout.data_file`)."""
    return os.path.join(paths.expand(workdir), layout.data_file(entry))


def receive_file(request: FileRequest, stream: BinaryIO) -> Done:
    """Store the bytes of `stream` as a data file, never more than `size` of the request. Raises ValueError when they are not the promised ones."""
    path = data_path(request.workdir, fields(request))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = files.partial_name(path)
    digest = hashlib.sha256()
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            for block in blocks(stream, request.size):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != request.sha256:
            raise ValueError(f"the file arrived damaged: {request.name}")
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return Done()


def blocks(stream: BinaryIO, most: int | None) -> Iterator[bytes]:
    """All that a stream holds. Raises ValueError where that is more than `most` bytes, before one too many is given."""
    count = 0
    for block in iter(lambda: stream.read(1 << 20), b""):
        count += len(block)
        if most is not None and count > most:
            raise ValueError(f"more bytes arrived than the announced {most}")
        yield block


def checkpoints(request: CheckpointsRequest) -> Checkpoints:
    """Complete checkpoints of a run, newest first, the first verified whole by content: {"good": [steps], "bad": {step: why}}.

    Older ones than the newest good one are not read, but with `layout` "sharded": the newest of which all nodes together have every part
    may be any of them, and "shards" says {step: which parts are here}. With `set_aside` in the request the bad
    ones are moved out of the way where a good one is left, with `begin_again` all of them; nothing of the run may be running then.
    Raises OSError where they cannot be moved: the next attempt would go on from them.
    """
    folder = paths.run_dir(request.workdir, request.run)
    if request.begin_again:
        program_checkpoints.set_all_aside(folder)
    good: list[int] = []
    bad: dict[str, str] = {}
    shards: dict[str, Shards] = {}
    bad.update((str(step), why) for step, why in program_checkpoints.keep(folder).items())
    reads_all = request.layout == checkpoint_holders.SHARDED
    for step in reversed(manifest.steps(folder)):
        if good and not reads_all and str(good[0]) not in shards:
            break
        fault = manifest.fault(manifest.folder_of(folder, step))
        if fault is None:
            good.append(step)
            here = manifest.shards(manifest.folder_of(folder, step))
            if here is not None:
                shards[str(step)] = Shards(of=here["of"], held=tuple(here["held"]))
        else:
            bad[str(step)] = fault
    if good and request.set_aside:
        for step in sorted(map(int, bad)):
            with contextlib.suppress(OSError):  # a bad one that cannot be moved does not hide a good one
                manifest.set_aside(manifest.folder_of(folder, step))
    return Checkpoints(good=tuple(good), bad=bad, run_known=os.path.isdir(folder), shards=shards)


def checkpoint_manifest(request: CheckpointRequest) -> Manifest:
    """What a checkpoint says of itself."""
    folder = manifest.folder_of(paths.run_dir(request.workdir, request.run), request.step)
    return Manifest(
        recipe_hash=(manifest.read(folder) or {}).get("recipe_hash"),
        path=folder,
        files=manifest.digests(folder),
        sizes=manifest.sizes(folder),
    )


def unpack_checkpoint(request: CheckpointRequest) -> Done:
    """Before a start: make ready what the program of the run is to go on from. Raises OSError, ValueError for a damaged one."""
    program_checkpoints.unpack(paths.run_dir(request.workdir, request.run), request.step)
    return Done()


def send_checkpoint(request: CheckpointRequest, stream: BinaryIO) -> None:
    """Write one checkpoint as a tar archive to `stream`. Raises ValueError when it is not whole."""
    folder = manifest.folder_of(paths.run_dir(request.workdir, request.run), request.step)
    if not os.path.isdir(folder):
        raise ValueError(f"there is no {folder}")
    fault = manifest.fault(folder)
    if fault:
        raise ValueError(f"{folder}: {fault}")
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                archive.add(path, arcname=name, recursive=False)


def receive_checkpoint(request: CheckpointRequest, stream: BinaryIO) -> Done:
    """Unpack a checkpoint beside its place, verify it, and put it there with one rename.

    A bad copy that lay there is set aside, and a whole one whose files differ from `files` of the request ({name: sha256}), too.
    Raises ValueError for one that is not whole, holds other `files` than were asked for, or more than `bytes` of the request.
    """
    folder = paths.run_dir(request.workdir, request.run)
    place = manifest.folder_of(folder, request.step)
    root, name = os.path.split(place)
    partial = os.path.join(root, f".{name}.{os.getpid()}.partial")  # the worker, or `program_checkpoints.keep`, removes such leftovers
    os.makedirs(partial)
    try:
        left = sys.maxsize if request.bytes is None else request.bytes
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                left -= member.size
                if left < 0:
                    raise ValueError(f"more bytes arrived than the announced {request.bytes}")
                if not member.isfile() or os.path.basename(member.name) != member.name or member.name in (".", ".."):
                    raise ValueError(f"unexpected entry in the archive: {member.name!r}")
                source = archive.extractfile(member)
                assert source is not None  # it is a file
                with open(os.path.join(partial, member.name), "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
        fault = manifest.fault(partial)
        if fault:
            raise ValueError(f"the checkpoint arrived damaged: {fault}")
        sent_digests = request.files
        arrived = manifest.digests(partial)
        if any(arrived.get(name) != sent_digests[name] for name in sent_digests):
            raise ValueError("the wrong checkpoint arrived")
        files.sync(partial)
        if os.path.isdir(place):
            present = manifest.digests(place)
            if manifest.fault(place) is None and all(present.get(name) == sent_digests[name] for name in sent_digests):
                return Done()
            manifest.set_aside(place)
        os.replace(partial, place)
        files.sync(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Done()
