"""The base model without its weights, before a launch: the worker's own build on the meta device, on this node. The answers are cached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from homelab.node import paths
from homelab.node.run import secret_files
from homelab.shared.protocol import files, hub_cache
from homelab.shared.protocol.errors import Refusal

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_KEPT_AT_MOST = 50
_MOST_NAMES = 200
_LIMIT_S = 120.0
_KEY = re.compile("[0-9a-f]{16,64}")


def build(request: JsonObject) -> JsonObject:
    """{"built": what `homelab.worker.tools.model_build` found}. `request`: workdir, key (names everything that the answer depends on), secrets (for the
    hub, kept nowhere) and the program's question. What comes from the hub is not kept. Raises Refusal where the program gives no answer."""
    if request.get("fetch"):
        return {"built": _fetched(request)}
    key = str(request["key"])
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a usable key: {key!r}")
    place = os.path.join(paths.expand(request["workdir"]), "models.json")
    kept = files.read_object(place) or {}
    if key not in kept:
        kept[key] = _ask(_question(request))
        while len(kept) > _KEPT_AT_MOST:
            del kept[next(iter(kept))]
        with contextlib.suppress(OSError):  # the next look costs seconds again
            files.write_json(place, kept)
    return {"built": kept[key]}


def _question(request: JsonObject) -> JsonObject:
    return {name: request.get(name) for name in ("model", "revision", "method", "train", "precision", "strategy", "fetch", "known")}


def _fetched(request: JsonObject) -> Any:
    """The same of a model of the hub, whose small files are fetched into a folder that is removed afterwards."""
    question = _question(request)
    question["known"] = [*(question["known"] or ()), *_cached_names()]
    with (
        tempfile.TemporaryDirectory(prefix="homelab-model-") as folder,
        secret_files.lent(request.get("secrets") or {}, dict(os.environ, HF_HUB_CACHE=folder)) as environment,
    ):
        return _ask(question, environment)


def _cached_names() -> list[str]:
    """Names of the models in the hub's cache of this node."""
    with contextlib.suppress(OSError):
        return hub_cache.model_names()[:_MOST_NAMES]
    return []


def _ask(question: JsonObject, environment: dict[str, str] | None = None) -> Any:
    """The last JSON line of the program's stdout."""
    command = [sys.executable, "-m", "homelab.worker.tools.model_build"]
    try:
        completed = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_LIMIT_S, errors="replace", env=environment
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"the model was not built without its weights within {_LIMIT_S:.0f} s") from None
    try:
        return json.loads((completed.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise Refusal(f"the model could not be built without its weights: {last[:500]}") from None
