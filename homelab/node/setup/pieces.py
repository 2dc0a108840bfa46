"""Receives the parts of an environment piece by piece: what was cut off goes on where it ended, and only whole files get their names."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from homelab.node.setup import record
from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.setup_messages import SetupReceived

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.setup_messages import PieceRequest

_NAMES = re.compile(r"uv\.whl|python\.tar\.gz|requirements\.txt|wheels/\w[\w.+!-]*\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def receive(request: PieceRequest, stream: BinaryIO) -> SetupReceived:
    """The next bytes of a file; the answer says from where to go on.

    Never more bytes than `size` are written, whatever is sent.
    Bytes that do not go on where the last ones ended are left out. A file that is not what was promised is removed, and begins at 0 again.
    No lock is held: a sender that has lost its network would hold it for hours. Two senders write the same bytes to the same places.
    """
    record.note(record.folder())
    target = place(request.name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return receive_into(record.folder(), os.path.relpath(target, record.folder()), request, stream)


def receive_into(folder: str, name: str, request: PieceRequest, stream: BinaryIO) -> SetupReceived:
    """The same for a file of this name in a folder of this node; partial files lie in the folder, so that a rename is enough in the end."""
    target, partial = os.path.join(folder, name), _partial(request.sha256, folder)
    os.makedirs(os.path.dirname(partial), exist_ok=True)
    have = partial_size(request.sha256, folder)
    if have < request.offset:
        return SetupReceived(have=have)
    with open(partial, "r+b" if os.path.exists(partial) else "wb") as out:
        out.truncate(request.offset)
        out.seek(request.offset)
        left = request.size - request.offset
        while left > 0 and (block := stream.read(min(1 << 20, left))):
            out.write(block)
            left -= len(block)
        out.flush()
        os.fsync(out.fileno())
        have = out.tell()
        is_longer = left <= 0 and bool(stream.read(1))
    if have < request.size:
        return SetupReceived(have=have)
    if is_longer or have > request.size or file_sha256(partial) != request.sha256:
        os.unlink(partial)
        return SetupReceived(have=0)
    os.chmod(partial, 0o600)
    os.replace(partial, target)
    files.sync(os.path.dirname(target))
    return SetupReceived(have=have)


def place(name: str) -> str:
    """Where a file of setup lies. Raises ValueError for a name that setup does not send."""
    if not _NAMES.fullmatch(name):
        raise ValueError(f"not a file of setup: {name!r}")
    return os.path.join(record.folder(), name)


def partial_size(sha256: str, folder: str = "") -> int:
    """How many bytes of a file have come that is not whole yet. Raises ValueError for what is no sha256."""
    path = _partial(sha256, folder or record.folder())
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _partial(sha256: str, folder: str) -> str:
    """Named by the content: a piece of another version of the file is never continued."""
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"not a sha256: {sha256!r}")
    return os.path.join(folder, "partial", sha256)
