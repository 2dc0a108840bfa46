"""Runs of homelab that are alive on this node, and ended runs whose secrets were still on its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from homelab.node.run import leftovers
from homelab.node.system import processes

if TYPE_CHECKING:
    from homelab.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """Their names."""
    alive = sorted(processes.of_runs(request["workdir"], request["node"]))
    return {"alive": alive, "secrets_removed": leftovers.remove_secrets(request["workdir"])}
