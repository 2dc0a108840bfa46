"""The code a node needs, as one archive in a folder named by its content: shipped once, never changed in place."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
from pathlib import Path

import homelab

_ROOT = Path(homelab.__file__).parent
_SHIPPED = ("node", "node/probes", "worker")


@functools.cache
def archive() -> tuple[str, bytes]:
    """(content hash of 16 hex digits, tar.gz bytes) of homelab/__init__.py, the agent and the worker."""
    files = [_ROOT / "__init__.py"]
    for folder in _SHIPPED:
        files += sorted((_ROOT / folder).glob("*.py"))
    return _packed(files)


@functools.cache
def package() -> tuple[str, bytes]:
    """The same of all of homelab, for a node that a run's supervisor is put on."""
    return _packed(sorted(_ROOT.rglob("*.py")))


def _packed(files: list[Path]) -> tuple[str, bytes]:
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for path in files:
            data = path.read_bytes()
            name = f"homelab/{path.relative_to(_ROOT)}"
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(data))
    return digest.hexdigest()[:16], buffer.getvalue()


def code_dir(workdir: str) -> str:
    """Where this version of the code lies on a node."""
    return f"{workdir}/code/{archive()[0]}"
