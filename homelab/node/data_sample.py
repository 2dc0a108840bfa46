"""A sample of the training data before a launch: this node's tokenizer over some rows. The results are cached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import secret_files
from homelab.node.system import hub
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.data_rows import beginning, longest_after

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from homelab.shared.protocol.files import JsonObject

ON_NODE_BYTES = 32 << 20  # of a file that lies here
_KEPT_AT_MOST = 50
_LIMIT_S = 120.0
_KEY = re.compile("[0-9a-f]{16,64}")


def sample_data(request: JsonObject, stream: BinaryIO) -> JsonObject:
    """{"sample": what `homelab.worker.tools.data_sample` found, or None}.

    `request`: workdir, key (names everything that the answer depends on), only_kept (true: nothing is read, None where nothing
    is kept), model (folder or None), revision, data ([data] of the recipe), seq_len, files {role: {"shown", "bytes", "whole",
    "unread", "longest", "path", "hub", "previews"}}, secrets (for the hub, kept nowhere). The rows are the next `bytes` of `stream`, in the order of
    the roles, or those of `path` where `bytes` is None, or those of the data set `hub`, which may be another one the next time: of it
    nothing is kept. `longest`: what `longest_after` found behind them.
    """
    key = str(request["key"])
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a usable key: {key!r}")
    place = os.path.join(paths.expand(request["workdir"]), "samples.json")
    kept = files.read_object(place) or {}
    if key in kept or request.get("only_kept"):
        return {"sample": kept.get(key)}
    with tempfile.TemporaryDirectory(prefix="homelab-sample-") as folder:
        sample = _ask(dict(request, files=dict(_written(request["files"], stream, folder))))
    if any(file.get("hub") for file in request["files"].values()):
        return {"sample": sample}
    kept[key] = sample
    while len(kept) > _KEPT_AT_MOST:
        del kept[next(iter(kept))]
    with contextlib.suppress(OSError):  # the next look costs seconds again
        files.write_json(place, kept)
    return {"sample": sample}


def _written(files: JsonObject, stream: BinaryIO, folder: str) -> Iterator[tuple[str, JsonObject]]:
    """Each role with a file of its own to read, which may be changed. A Parquet file is read where it lies, hub data by the worker."""
    for role, file in sorted(files.items()):
        previews = int(file.get("previews") or 0)
        if file.get("hub"):
            yield role, {"hub": file["hub"], "shown": file["shown"], "previews": previews}
            continue
        longest = file.get("longest") or []
        if file.get("bytes") is not None:
            content, whole = stream.read(int(file["bytes"])), bool(file.get("whole"))
            rows = None if file.get("unread") else content
        else:
            path = paths.expand(file["path"])
            if path.endswith(".parquet"):
                yield role, {"path": path, "shown": file["shown"], "whole": False, "previews": previews}
                continue
            rows, whole = beginning(path, ON_NODE_BYTES)
            longest = longest_after(path, len(rows)) if rows is not None and not whole else []
        place = None
        if rows is not None:
            os.mkdir(os.path.join(folder, layout.checked(role)))
            place = os.path.join(folder, role, os.path.basename(str(file["shown"])))  # hints name it
            with open(place, "wb") as out:
                out.write(rows)
        yield role, {"path": place, "shown": file["shown"], "whole": whole, "longest": longest, "previews": previews}


def _ask(question: JsonObject) -> Any:
    """The worker's look: the last JSON line of its stdout."""
    command = [sys.executable, "-m", "homelab.worker.tools.data_sample"]
    secrets = question.pop("secrets", None) or {}
    environment = dict(os.environ)
    if any(file.get("hub") for file in question["files"].values()) and hub.way() not in ("ok", None):
        environment["HF_HUB_OFFLINE"] = "1"  # the cache is read at once; otherwise every request would be tried for half a minute
    try:
        with secret_files.lent(secrets, environment) as environment:
            completed = subprocess.run(
                command, input=json.dumps(question), capture_output=True, text=True, timeout=_LIMIT_S, errors="replace", env=environment
            )
        return json.loads((completed.stdout.strip().splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        raise ValueError(f"reading a sample of the data took longer than {_LIMIT_S:.0f} s") from None
    except ValueError:
        last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise ValueError(f"reading a sample of the data failed: {last[:500]}") from None
