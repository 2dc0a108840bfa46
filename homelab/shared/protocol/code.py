"""Which files of homelab a node gets, and the digest that names one version of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator

ANOTHER_PYTHON = "HOMELAB_ANOTHER_PYTHON"
"""The variable of the agent's environment that is not empty where nothing is at the path of cluster.toml, and python3 runs it instead."""
SHIPPED_ROOMS = ("node", "shared", "worker")


def shipped_files(root: str) -> list[str]:
    """The shipped files as paths relative to `root` (the folder homelab/), with "/", sorted: __init__.py and every module of the shipped rooms."""
    files = ["__init__.py"]
    for room in SHIPPED_ROOMS:
        for folder, _, names in os.walk(os.path.join(root, room)):
            files += [os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/") for name in names if name.endswith(".py")]
    return sorted(files)


def contents(root: str, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file. Raises OSError for a file that cannot be read."""
    for name in files:
        with open(os.path.join(root, name), "rb") as stream:
            yield name, stream.read()


def code_digest(contents: Iterable[tuple[str, bytes]]) -> str:
    """16 hex digits: sha256 over "name NUL size NUL bytes" of each file, in this order."""
    digest = hashlib.sha256()
    for name, data in contents:
        digest.update(b"homelab/%s\0%d\0" % (name.encode(), len(data)) + data)
    return digest.hexdigest()[:16]
