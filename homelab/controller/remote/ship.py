"""The code a node needs, as one archive in a folder named by its content: shipped once, never changed in place."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import homelab
from homelab.shared.protocol.code import code_digest, contents, shipped_files

_ROOT = Path(homelab.__file__).parent


class Parcel:
    """Files of homelab, read once: what is sent later is what the hash names, also where the files have changed meanwhile."""

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self.names = names
        self._making = threading.Lock()  # all nodes are asked at once: else each of their threads makes the same
        self._contents: dict[str, bytes] = {}
        self._hash = ""
        self._archive = b""

    def content_hash(self) -> str:
        """16 hex digits, the name of the folder on a node."""
        with self._making:
            if not self._hash:
                self._contents = dict(contents(str(_ROOT), self.names()))
                self._hash = code_digest(self._contents.items())
            return self._hash

    def archive(self) -> bytes:
        """The tar.gz for a node that lacks it. It costs 0.1 s, and most commands meet no such node."""
        self.content_hash()
        with self._making:
            if not self._archive:
                self._archive = tar({f"homelab/{name}": data for name, data in self._contents.items()}, mode=0o644)
            return self._archive


# What every node gets (`homelab.shared.protocol.code`).
CODE = Parcel(lambda: shipped_files(str(_ROOT)))
# All of homelab with its text files, for a node that a run's supervisor is put on.
PACKAGE = Parcel(lambda: sorted(str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*") if path.suffix in (".py", ".toml")))


def tar(files: Mapping[str, bytes], *, mode: int) -> bytes:
    """A tar.gz of these files, by name, all with this mode."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def code_dir(workdir: str) -> str:
    """Where this version of the code lies on a node."""
    return f"{workdir}/code/{CODE.content_hash()}"
