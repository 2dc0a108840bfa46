"""What this node answers about itself: {"node", "broken", one key per probe}. A probe that breaks is named in "broken", and its key is missing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from homelab.node.system import boot_clock

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

PROBES = (
    "system",
    "resources",
    "python",
    "xid",
    "gpu",
    "amd",
    "network",
    "model",
    "speed_profiles",
    "data",
    "power",
    "runs",
    "collective_check",
)


def collect(request: JsonObject) -> JsonObject:
    """The facts (types: `homelab.controller.facts.node.Facts`).

    `request`: node, workdir, peers, port, model, revision, method {"kind"}, data {role: path}. A probe finds there, too, as "facts", what
    the probes before it have answered.
    """
    began_s = boot_clock.clock_s()
    facts: JsonObject = {"node": request["node"], "broken": {}}
    for name in PROBES:
        try:
            facts[name] = importlib.import_module("homelab.node.probes." + name).read({**request, "facts": facts})
        except Exception as error:  # noqa: BLE001 - one broken probe takes nothing from the others
            facts["broken"][name] = (f"{type(error).__name__}: {error}")[:300]
    if "system" in facts:  # the first probe, which has read the clock
        facts["system"]["time_s_ago"] = round(boot_clock.clock_s() - began_s, 3)
    return facts
