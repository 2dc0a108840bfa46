"""The base model without its weights, before a launch: the worker's own build on the meta device, on this node. The answers are cached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from homelab.node import paths
from homelab.protocol import files
from homelab.protocol.errors import Refusal

if TYPE_CHECKING:
    from homelab.protocol.files import JsonObject

_KEPT_AT_MOST = 50
_LIMIT_S = 120.0
_KEY = re.compile("[0-9a-f]{16,64}")


def build(request: JsonObject) -> JsonObject:
    """{"built": what `homelab.worker.tools.model_build` found}. `request`: workdir, key (names everything that the answer depends on) and the
    program's question. Raises Refusal where the program gives no answer."""
    key = str(request["key"])
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a usable key: {key!r}")
    place = os.path.join(paths.expand(request["workdir"]), "models.json")
    kept = files.read_object(place) or {}
    if key not in kept:
        kept[key] = _ask({name: request.get(name) for name in ("model", "revision", "method", "train", "precision", "strategy")})
        while len(kept) > _KEPT_AT_MOST:
            del kept[next(iter(kept))]
        with contextlib.suppress(OSError):  # the next look costs seconds again
            files.write_json(place, kept)
    return {"built": kept[key]}


def _ask(question: JsonObject) -> Any:
    """The last JSON line of the program's stdout."""
    command = [sys.executable, "-m", "homelab.worker.tools.model_build"]
    try:
        completed = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=_LIMIT_S, errors="replace")
    except subprocess.TimeoutExpired:
        raise Refusal(f"the model was not built without its weights within {_LIMIT_S:.0f} s") from None
    try:
        return json.loads((completed.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise Refusal(f"the model could not be built without its weights: {last[:500]}") from None
