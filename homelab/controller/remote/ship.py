"""The code a node needs, as one archive in a folder named by its content: shipped once, never changed in place."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import homelab
from homelab.shared.protocol.code import code_digest, shipped_files

_ROOT = Path(homelab.__file__).parent


@functools.cache
def archive() -> tuple[str, bytes]:
    """(content hash of 16 hex digits, tar.gz bytes) of what every node gets (`homelab.shared.protocol.code`)."""
    return _packed(shipped_files(str(_ROOT)))


@functools.cache
def package() -> tuple[str, bytes]:
    """The same of all of homelab with its text files, for a node that a run's supervisor is put on."""
    return _packed(sorted(str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*") if path.suffix in (".py", ".toml")))


def _packed(names: list[str]) -> tuple[str, bytes]:
    return code_digest(str(_ROOT), names), tar({f"homelab/{name}": (_ROOT / name).read_bytes() for name in names}, mode=0o644)


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
    return f"{workdir}/code/{archive()[0]}"
