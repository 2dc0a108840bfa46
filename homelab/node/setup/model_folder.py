"""The base model of a recipe on this node, and its data of the hub: which of their files are there, and receiving those that are not.

A model by its path lies there; one of the hub in the hub's cache, as plain files (models--ORG--NAME/snapshots/COMMIT, refs/REVISION), which the hub's library
takes without a network (huggingface_hub 2.4, `_snapshot_download.py`). Data lies in the cache of `datasets` (ORG___NAME/CONFIGURATION/VERSION/COMMIT), as that library
prepares it; its place begins with "data:".
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from homelab.node.setup import installed, pieces, record
from homelab.node.storage import digests
from homelab.node.system import hub
from homelab.shared.protocol import files, hub_cache
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.setup_messages import ModelState, SetupReceived

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.setup_messages import ModelRequest, PieceRequest

_FILE = re.compile(r"\w[\w.+-]{0,200}")
_DATA_FOLDERS = 3  # of a data set, its configuration and its version
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIMIT_S = 3000.0  # a large model is read to its end once; afterwards its digest is kept


def look(request: ModelRequest) -> ModelState:
    """Which of the files are here, read to their ends."""
    folder = place(request.model, request.commit)
    kept = digests.Kept(request.workdir, _LIMIT_S)
    good = []
    for name, sha256 in request.files.items():
        path = os.path.join(folder, name)
        try:
            if _FILE.fullmatch(name) and os.path.isfile(path) and kept.of(path, deep=True)["sha256"] == sha256:
                good.append(name)
        except OSError:  # it cannot be read, and is sent again
            continue
    kept.save()
    is_ours = request.commit or folder in record.read()["folders"]
    others = [] if is_ours else [name for name in request.files if name not in good and os.path.lexists(os.path.join(folder, name))]
    partial = {name: size for name, sha256 in request.files.items() if (size := pieces.partial_size(sha256, folder))}
    reference = _reference(request)
    return ModelState(
        folder=folder, good=tuple(sorted(good)), others=tuple(sorted(others)), partial=partial, disk_free=installed.disk_free(folder),
        is_named=reference is None or files.text(reference).strip() == request.commit,
    )  # fmt: skip


def receive(request: PieceRequest, stream: BinaryIO) -> SetupReceived:
    """The next bytes of one file, as `pieces.receive`.

    A folder that was not there before is written down for teardown. Raises ValueError for a name that is no plain file name.
    """
    name = checked_name(request.name)
    folder = place(request.model, request.commit)
    if not os.path.isdir(folder):
        record.note(folder)
    answer = pieces.receive_into(folder, name, request, stream)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(folder, "partial"))  # unless a file is still coming
    return answer


def name_commit(request: ModelRequest) -> Done:
    """Let the revision mean this commit, whose files are all here: before that it would name half a model. What it meant is written down for teardown."""
    reference = _reference(request)
    if reference is not None:
        record.note_reference(reference, request.commit)
        files.write_atomic(reference, request.commit.encode())
    return Done()


def checked_name(name: str) -> str:
    """The name of a file of a model. Raises ValueError for one that is no plain file name."""
    if not _FILE.fullmatch(name):
        raise ValueError(f"not a file of a model: {name!r}")
    return name


def place(model: str, commit: str) -> str:
    """The folder of the model's files. Raises ValueError for a commit that is none."""
    if not commit:
        return os.path.expanduser(model)
    if not _COMMIT.fullmatch(commit) or ".." in model:
        raise ValueError(f"not a model of the hub: {model!r} at {commit!r}")
    if model.startswith("data:"):
        parts = model[5:].split("/")
        if len(parts) != _DATA_FOLDERS or not all(_FILE.fullmatch(part) for part in parts):
            raise ValueError(f"not the name of a data set: {model!r}")
        return os.path.join(hub.data_cache(), *parts, commit)
    return os.path.join(hub_cache.snapshots(model), commit)


def _reference(request: ModelRequest) -> str | None:
    """The file of the hub's cache that says which commit the revision means; None where none is needed. Raises ValueError for what is no revision."""
    if not request.commit or request.revision in ("", request.commit):
        return None
    place(request.model, request.commit)  # a name that leads elsewhere is refused
    reference = hub_cache.reference(request.model, request.revision)
    if reference is None:
        raise ValueError(f"not a revision: {request.revision!r}")
    return reference
