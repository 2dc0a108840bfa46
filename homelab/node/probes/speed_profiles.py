"""What runs of the recipe's model and method have measured on this node."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from homelab.node import paths

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_SPEEDS_BYTES = 1 << 20  # a file of speeds has about one kilobyte


def read(request: JsonObject) -> JsonObject | None:
    """The file of speeds, where a recipe asks for one."""
    if not request.get("method"):
        return None
    return _speeds(paths.expand(request["workdir"]), request["model"], request["method"])


def _speeds(workdir: str, model: str, method: JsonObject) -> JsonObject:
    """What runs of this model and method have measured here (written by `homelab.worker.training.speed_profile`); a damaged file says so."""
    path = paths.speeds_file(workdir, model, method)
    answer = {"path": path, "found": os.path.lexists(path), "problem": None, "content": None}
    if not answer["found"]:
        return answer
    try:
        if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):  # reading a pipe would wait
            answer["problem"] = "it is not a file"
            return answer
        if os.path.getsize(path) > _SPEEDS_BYTES:
            answer["problem"] = "the file is far too large"
            return answer
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except OSError as error:
        answer["problem"] = error.strerror or str(error)
    except (ValueError, RecursionError):
        answer["problem"] = "it is damaged: not JSON"
    else:
        if isinstance(content, dict):
            answer["content"] = content
        else:
            answer["problem"] = "it is damaged: not a JSON object"
    return answer
