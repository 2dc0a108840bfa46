"""A result comes from a node into a folder here: by offset, verified, with one rename at the end.

PLACE/fetched.json      the files that were fetched, with their digests; it tells a folder of ours from others
.PLACE.partial/         beside it while files come: whole ones under their names, others under SHA256.part
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.results.missing import Missing, check_room, missing, weights_fault
from homelab.controller.remote.agent import Agent
from homelab.controller.run import store
from homelab.shared.protocol import files, result_files
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.result_messages import PartRequest, ResultFile, ResultRequest

RECORD = "fetched.json"
_PART = ".part"
_PIECE_BYTES = 32 << 20
_PIECE_TIMEOUT_S = 900.0  # 37 kB/s
_MOST_BEGINNINGS = 3


def checked_place(place: Path) -> Path:
    """The absolute path of a folder for results. Raises InputError for one that cannot be replaced as a whole."""
    whole = Path(os.path.abspath(place))
    is_here = Path.cwd().is_relative_to(whole.resolve())
    if is_here or os.path.ismount(whole):
        raise InputError(
            f"{'the current folder' if is_here else 'a mounted disk'} cannot be replaced as a whole", where=str(place),
            hint=f"name a new folder in it as the last argument, like {shlex.quote(str(whole / 'model'))}",
        )  # fmt: skip
    return whole


def is_there(place: Path, wanted: Sequence[ResultFile]) -> bool:
    """Whether the folder holds exactly what was fetched, and that is what is wanted. False where it is to be (re)placed.

    Raises InputError for a folder that was not made by a fetch, HomelabError for one that was changed since.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return False
    record = files.read_object(place / RECORD)
    entries = record.get("files") if record else None
    if not isinstance(entries, dict):
        raise InputError(
            "this path already exists and was not made by homelab fetch", where=str(place), hint="name another folder as the last argument"
        )
    for name, sha256 in entries.items():
        path = place / (name if result_files.is_saved_name(name) else Path(name).name)
        if not path.is_file() or file_sha256(path) != sha256:
            raise HomelabError(
                f"{path.name} differs from the fetched file: it was edited or is damaged", where=str(path),
                hint=Hint("keep your copy under another name: mv {} {}; then fetch again", shlex.quote(str(place)), shlex.quote(f"{place}.mine")),
            )  # fmt: skip
    if entries == {file.name: file.sha256 for file in wanted}:
        return True
    parts = {(*parents, name) for *parents, name in (file.name.split("/") for file in wanted)}
    for name in added(place):
        own = tuple(name.split("/"))
        if any(part[: len(own)] == own or own[: len(part)] == part for part in parts):
            path = place / name
            raise HomelabError(
                f"the newer result has a file of the name {name}, and this one was not fetched", where=str(path),
                hint=Hint("keep yours under another name: mv {} {}; then fetch again", shlex.quote(str(path)), shlex.quote(f"{path}.mine")),
            )  # fmt: skip
    return False


def added(place: Path) -> list[str]:
    """The names, below a fetched folder, of the files that somebody has put there since: the record does not know them."""
    record = files.read_object(place / RECORD) or {}
    known = {RECORD, *(record.get("files") or {})}
    found = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(name for name in found if name not in known)


@contextmanager
def held(place: Path) -> Iterator[Path]:
    """The folder beside `place` where files come to, for one process at a time. Raises HomelabError."""
    partial = place.parent / f".{place.name}.partial"
    with store.disk_errors_as_hints(place):
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    except BlockingIOError:
        raise HomelabError(
            "another process is fetching to this folder now", where=str(place), hint="wait until it ends, or name another folder"
        ) from None
    finally:
        os.close(descriptor)


def look(partial: Path, wanted: Sequence[ResultFile]) -> tuple[Missing, ...]:
    """What is still missing; what belongs to another result is removed. Raises HomelabError where the disk has no room."""
    sizes = {file.name: file.size for file in wanted}
    known = {f"{file.sha256}{_PART}": file.sha256 for file in wanted}
    whole, parts = {}, {}
    for path in sorted(partial.rglob("*"), reverse=True):  # what is in a folder before the folder
        name = path.relative_to(partial).as_posix()
        if name in known:
            parts[known[name]] = path.stat().st_size
        elif path.is_file() and not path.is_symlink() and path.stat().st_size == sizes.get(name):
            whole[name] = file_sha256(path)
        elif path.is_symlink() or not path.is_dir():
            path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()
    found = missing(wanted, whole, parts)
    check_room(found, shutil.disk_usage(partial).free, str(partial.parent))
    return found


def one(agent: Agent, request: ResultRequest, part: Missing, partial: Path, told: Callable[[int], None]) -> None:
    """Bring one file. Raises HomelabError where it comes damaged again and again, UnreachableError where the node is gone: then call again."""
    file, path = part.file, partial / f"{part.file.sha256}{_PART}"
    for _ in range(_MOST_BEGINNINGS):
        with store.disk_errors_as_hints(path), path.open("ab") as out:
            if out.tell() > file.size:
                out.truncate(0)
            while (have := out.tell()) < file.size:
                count = min(_PIECE_BYTES, file.size - have)
                into = _Counted(out, count, told)
                agent.fetch(
                    "result-part",
                    PartRequest(run=request.run, folder=request.folder, name=file.name, offset=have, count=count),
                    cast(BinaryIO, into),
                    most_bytes=count,
                    timeout_s=_PIECE_TIMEOUT_S,
                )
                if out.tell() == have:
                    raise HomelabError(
                        f"{file.name} became shorter while it was fetched",
                        where=f"node {agent.node.name}",
                        hint=homelab("fetch", request.run),
                    )
            out.flush()
            os.fsync(out.fileno())
        if file_sha256(path) == file.sha256:
            break
        path.unlink()
        told(-file.size)
    else:
        raise HomelabError(
            f"{file.name} arrived damaged {_MOST_BEGINNINGS} times", where=f"node {agent.node.name}", hint=homelab("fetch", request.run)
        )
    with path.open("rb") as stream:
        fault = weights_fault(file.name, stream.read(9), file.size)
    if fault:
        path.unlink()
        raise HomelabError(f"{file.name} is refused: {fault}", where=f"node {agent.node.name}", hint=homelab("logs", request.run))
    with store.disk_errors_as_hints(partial / file.name):
        (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, partial / file.name)


def finish(partial: Path, place: Path, wanted: Sequence[ResultFile], about: dict[str, Any]) -> None:
    """Everything is here: write the record, and put the folder to its place with one rename; what was fetched there before goes.

    Files that somebody has added to the folder stay in it.
    """
    with store.disk_errors_as_hints(place):
        files.write_json(partial / RECORD, {**about, "files": {file.name: file.sha256 for file in wanted}})
        files.sync(partial)
        old = place.parent / f".{place.name}.old"
        if old.is_dir() and not place.exists():  # an earlier call ended between the two renames
            os.replace(old, place)
        shutil.rmtree(old, ignore_errors=True)
        for name in added(place):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(place / name, partial / name, follow_symlinks=False)
            except OSError:  # a disk without links
                shutil.copy2(place / name, partial / name, follow_symlinks=False)
        if place.exists():
            os.replace(place, old)
        os.replace(partial, place)
        files.sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)


class _Counted:
    """Passes on at most so many bytes, and tells how many came."""

    def __init__(self, into: BinaryIO, most: int, told: Callable[[int], None]) -> None:
        self._into, self._left, self._told = into, most, told

    def write(self, block: bytes) -> int:
        """As a file's `write`. More than was asked for is left out."""
        taken = block[: self._left]
        self._left -= len(taken)
        self._into.write(taken)
        self._told(len(taken))
        return len(block)
