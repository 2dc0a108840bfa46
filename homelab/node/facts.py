"""What this node says of itself, in one answer. Every probe stands alone: one that breaks is named, and its fields stay empty."""

import importlib

PROBES = ("system", "room", "python", "gpu", "amd", "xid", "network", "model", "speeds", "data", "power", "runs", "collective")


def collect(request):
    """The facts (types: `homelab.facts.Facts`).

    `request`: node, workdir, peers, port, model, revision, method {"kind"}, data {role: path}.
    """
    facts = {"node": request["node"], "broken": {}}
    for name in PROBES:
        try:
            facts.update(importlib.import_module("homelab.node.probes." + name).read(request))
        except Exception as error:
            facts["broken"][name] = ("%s: %s" % (type(error).__name__, error))[:300]
    return facts
