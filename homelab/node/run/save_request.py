"""Ask the ranks of this node for a checkpoint: a file that the first of them sees at its next step, tells the others of, and removes after the save."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done

if TYPE_CHECKING:
    from homelab.shared.protocol.run_requests import SaveRequest


def put(request: SaveRequest) -> Done:
    """Put it there. Raises Refusal for an attempt that has not started here, or is not the newest."""
    folder = paths.run_dir(request.workdir, request.run)
    node = paths.name_here(folder, request.attempt, request.node)
    newest = paths.newest_attempt(folder)
    if request.attempt != newest or node not in paths.names_here(folder, newest):
        raise Refusal(f"attempt {request.attempt} of {request.run} does not train on this node", where=folder)
    files.write_json(os.path.join(folder, layout.save_request(newest, node)), {"time": time.time()})
    return Done()
