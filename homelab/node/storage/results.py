"""What a run has made on this node: which results are here, their files with digests, and the bytes of a file from any place on."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.storage import program_checkpoints
from homelab.node.storage.digests import Kept
from homelab.shared.protocol import files, layout, manifest, profile_files, result_files
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.result_messages import ResultFile, ResultFiles, Results

if TYPE_CHECKING:
    from typing import BinaryIO, Literal

    from homelab.shared.protocol.request import RunRequest
    from homelab.shared.protocol.result_messages import PartRequest, ResultRequest

_DIGEST_LIMIT_S = 3 * 3600.0
_BLOCK_BYTES = 1 << 20


def look(request: RunRequest) -> Results:
    """Which results of a run lie here. Memory is what programs may still take (MemAvailable of proc_meminfo(5))."""
    folder = paths.run_dir(request.workdir, request.run)
    state = os.statvfs(paths.expand(request.workdir))
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return Results(
        run_known=bool(names),
        final=_is_whole(os.path.join(folder, layout.FINAL)),
        merged=_merged_from(os.path.join(folder, result_files.MERGED)),
        machine=platform.machine(),
        gguf=tuple(
            name[len(result_files.GGUF) + 1 :]
            for name in names
            if name.startswith(f"{result_files.GGUF}-") and _is_whole(os.path.join(folder, name))
        ),
        steps=tuple(manifest.steps(folder)),
        exported=tuple(step for step in manifest.steps(folder) if _is_whole(os.path.join(folder, result_files.exported(step)))),
        profiles=tuple(_profiled(folder)),
        saved_files=len(_saved(folder)[0]),
        saved_step=(program_checkpoints.newest(folder) or (0, ""))[0],
        memory_bytes=_available_bytes(),
        disk_bytes=state.f_bavail * state.f_frsize,
    )


def kind(folder: str) -> Literal["", "final", "saved"]:
    """What a run has brought forth: a trained model, or what a program of one's own has saved; "" for neither."""
    if _is_whole(os.path.join(folder, layout.FINAL)):
        return "final"
    return "saved" if any(_saved(folder)) else ""


def listed(request: ResultRequest) -> ResultFiles:
    """The files of a result with size and sha256; `left_out`: names of those that are not sent. Raises Refusal."""
    folder = _folder(request)
    if request.folder == layout.SAVED:
        sent, left_out = _saved(os.path.dirname(folder))
    else:
        names = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
        sent = [name for name in names if result_files.is_name(name)]
        left_out = [name for name in names if name not in sent]
    kept = Kept(request.workdir, _DIGEST_LIMIT_S)
    parts = [{"name": name, **kept.of(os.path.join(folder, name), deep=True)} for name in sent]
    kept.save()
    return ResultFiles(
        path=folder,
        files=tuple(ResultFile(name=part["name"], size=part["size_bytes"], sha256=part["sha256"]) for part in parts),
        left_out=tuple(left_out),
    )


def send_part(request: PartRequest, stream: BinaryIO) -> None:
    """Write `count` bytes of a file from `offset` on to `stream`. Raises ValueError for another name."""
    folder, name = _folder(request), request.name
    if not result_files.may_leave(request.folder, name) or (request.folder == layout.SAVED and not _is_plain(folder, name)):
        raise ValueError(f"not a file of a result: {name!r}")
    left = request.count
    with open(os.path.join(folder, name), "rb") as source:
        source.seek(request.offset)
        while left > 0:
            block = source.read(min(_BLOCK_BYTES, left))
            if not block:
                return
            stream.write(block)
            left -= len(block)


def _folder(request: ResultRequest | PartRequest) -> str:
    folder = os.path.join(paths.run_dir(request.workdir, request.run), result_files.folder(request.folder))
    if not os.path.isdir(folder):
        raise Refusal("this result is not on this node", where=folder, hint="`homelab status` shows which nodes took part")
    return folder


def _saved(folder: str) -> tuple[list[str], list[str]]:
    """The files below saved/ of a run's folder that may be fetched, and those that may not: links, and odd names. What is hidden is no result."""
    root = os.path.join(folder, layout.SAVED)
    sent: list[str] = []
    left_out: list[str] = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in sorted([*links, *(name for name in names if not name.startswith("."))]):
            inside = os.path.relpath(os.path.join(place, name), root)
            (sent if result_files.is_saved_name(inside) and _is_plain(root, inside) else left_out).append(inside)
    return sent, left_out


def _is_plain(root: str, inside: str) -> bool:
    """Whether this is a file of its own below `root`: no link leads to it."""
    path = os.path.join(os.path.realpath(root), inside)
    return os.path.isfile(path) and os.path.realpath(path) == path


def _is_whole(folder: str) -> bool:
    """Results get their name when they are complete, and all have a card."""
    return os.path.isfile(os.path.join(folder, result_files.CARD))


def _profiled(folder: str) -> list[int]:
    """Ranks whose profile is here: its folder has its name when it is whole."""
    place = os.path.join(folder, profile_files.PROFILES)
    ranks = [profile_files.rank_of(name) for name in os.listdir(place)] if os.path.isdir(place) else []
    return sorted(rank for rank in ranks if rank is not None)


def _merged_from(folder: str) -> str:
    record = files.read_object(os.path.join(folder, result_files.MERGED_FROM)) if _is_whole(folder) else None
    return str((record or {}).get("folder") or "")


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
