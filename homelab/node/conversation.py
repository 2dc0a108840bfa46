"""A conversation with a run's model: this process becomes the worker's program, which reads questions from stdin until that is closed."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.worker_programs import cards_of

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def converse(request: JsonObject) -> None:
    """`request`: workdir, run, node, models ("trained", "base" or both), silent_s (see the program).

    The controller writes nothing more before the program says that it is ready.
    """
    run_dir = paths.run_dir(request["workdir"], request["run"])
    body = json.dumps({"run_dir": run_dir, "models": request["models"], "silent_s": request.get("silent_s")})
    environment = dict(os.environ, HF_HUB_DISABLE_PROGRESS_BARS="1", **cards_of(run_dir, request["node"]))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "homelab.worker.tools.conversation", body], environment)
