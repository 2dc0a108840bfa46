"""The Python that was sent to this node, for an environment where the node has none that is new enough."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile

from homelab.node.setup import pieces, record
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.errors import Refusal

ARCHIVE = "python.tar.gz"


def unpack(version: str) -> str:
    """The path of the program of this version ("3.12"). It is unpacked once, and gets its place with one rename.

    Raises Refusal for an archive without that program, ValueError for entries that lead out of the folder.
    """
    archive = pieces.place(ARCHIVE)
    folder = os.path.join(record.folder(), f"python-{file_sha256(archive)[:16]}")
    program = os.path.join(folder, "bin", f"python{version}")
    if not os.path.isdir(folder):
        partial = tempfile.mkdtemp(prefix=".python-", dir=record.folder())
        try:
            with tarfile.open(archive, "r:gz") as entries:
                for entry in entries:
                    _check(entry)
                    entries.extract(entry, partial)
            os.chmod(partial, 0o755)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if not os.access(program, os.X_OK):
        raise Refusal(f"the Python that was sent holds no python{version}", where=archive, hint="homelab setup")
    return program


def _check(entry: tarfile.TarInfo) -> None:
    """Raises ValueError. Not tarfile's own filter, which Python 3.9 may be without."""
    paths = [entry.name] + ([os.path.join(os.path.dirname(entry.name), entry.linkname)] if entry.issym() else [])
    if not (entry.isfile() or entry.isdir() or entry.issym()) or any(
        os.path.isabs(path) or os.path.normpath(path).startswith("..") for path in paths
    ):
        raise ValueError(f"unexpected entry in the archive: {entry.name!r}")
