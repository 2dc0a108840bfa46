"""A checkpoint on its way to the nodes that go on with it."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import gigabytes
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import checkpoint_holders
from homelab.shared.protocol.checkpoint_holders import Copy
from homelab.shared.protocol.checkpoint_messages import CheckpointRequest

_TIMEOUT_S = 4 * 3600.0  # a full fine-tune's checkpoint has tens of GB; a node that falls silent meanwhile is noticed by itself

_OF_THE_MANIFEST_BYTES = 64 << 20  # complete.json itself, and what a program of one's own keeps beside it
_OF_THE_ARCHIVE_BYTES = 16 << 20  # the heads of the archive's entries


def bring(
    fleet: Fleet, paths: RunPaths, checkpoint: ResumePoint, names: Sequence[str], say: Callable[[str], None], *, to_all: bool
) -> None:
    """Make sure that one of the nodes `names` holds the checkpoint whole: the ranks bring it to the others among themselves, over the LAN.

    Where only another node holds it, the first of `names` receives it by way of this machine. `to_all` (for a [script], whose program
    knows nothing of that): every node that lacks it receives it. Which is decided by `checkpoint_holders`. Raises HomelabError, also
    where shards would have to be moved: the nodes that have them are needed.
    """
    moves = checkpoint_holders.copies(checkpoint.held, names, to_all=to_all)
    if not moves:
        return
    if checkpoint.shards:
        raise _not_moved(paths.name, checkpoint.step, moves)
    source, targets = moves[0].source, [move.target for move in moves]
    say(f"bringing checkpoint {checkpoint.step} from {source} to {', '.join(targets)}")
    size = _size_bytes(paths, checkpoint, source)
    request = CheckpointRequest(run=paths.name, step=checkpoint.step, files=dict(checkpoint.files), bytes=size)
    # In the run's folder: the one for temporary files is often in memory.
    with (
        store.disk_errors_as_hints(paths.root / ".checkpoint"),
        tempfile.NamedTemporaryFile(prefix=".checkpoint-", dir=paths.root) as archive,
    ):
        fleet.agent(source).fetch("send-checkpoint", request, archive, most_bytes=size + _OF_THE_ARCHIVE_BYTES, timeout_s=_TIMEOUT_S)  # type: ignore[arg-type]
        archive.flush()
        _compare(
            archive.name, checkpoint, source, Hint("leave {} out: {}", source, homelab("recover", paths.name, "--nodes", ",".join(targets)))
        )

        def send(name: str) -> None:
            with open(archive.name, "rb") as stream:
                fleet.agent(name).send("receive-checkpoint", request, stream, timeout_s=_TIMEOUT_S)

        _, errors = fleet.on_all_until_stopped(targets, send)
    for error in errors.values():
        raise error


def _size_bytes(paths: RunPaths, checkpoint: ResumePoint, source: str) -> int:
    """The most that comes: what the node has said of its files, or what there is room for. Raises HomelabError where that is no room."""
    free = shutil.disk_usage(paths.root).free
    size = checkpoint.sizes.get(source, free) + _OF_THE_MANIFEST_BYTES
    if size - _OF_THE_MANIFEST_BYTES > free:
        raise HomelabError(
            f"checkpoint {checkpoint.step} has {gigabytes(size)} GB, and there are {gigabytes(free)} GB free here, on its way", where=str(paths.root),
            hint=Hint("make room there, or let only {} continue with it: {}", source, homelab("recover", paths.name, "--nodes", source)),
        )  # fmt: skip
    return size


def _compare(archive: str, checkpoint: ResumePoint, source: str, hint: Hint) -> None:
    """Before a byte goes on to another node. Raises HomelabError where it is not the checkpoint whose digests the nodes have said."""
    left = dict(checkpoint.files)
    try:
        with tarfile.open(archive, mode="r:") as content:
            for member in content:
                wanted = left.pop(member.name, None)
                file = content.extractfile(member) if member.isfile() else None
                # A member is a BufferedReader, though tarfile's types say less.
                if file is None or (wanted is not None and hashlib.file_digest(file, "sha256").hexdigest() != wanted):  # type: ignore[arg-type]
                    raise ValueError(f"{member.name} differs from the file on its node")
        if left:
            raise ValueError(f"{', '.join(left)} did not arrive")
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise HomelabError(f"checkpoint {checkpoint.step} arrived damaged: {error}", where=f"node {source}", hint=hint) from error


def _not_moved(run: str, step: int, moves: Sequence[Copy[str]]) -> HomelabError:
    """Shards of a checkpoint that only nodes outside of the plan have."""
    sources = list(dict.fromkeys(move.source for move in moves))
    parts = sorted({move.part for move in moves})
    nodes = dict.fromkeys([*(move.target for move in moves), *sources])
    return HomelabError(
        f"{', '.join(sources)} cannot be left out: no node of the plan has shard {', '.join(map(str, parts))} of checkpoint {step}",
        where=run,
        hint=Hint(
            "fix {} ({}), and use it again: {}",
            ", ".join(sources),
            homelab("preflight"),
            homelab("recover", run, "--nodes", ",".join(nodes)),
        ),
    )
