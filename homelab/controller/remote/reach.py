"""Which nodes of a cluster file this machine reaches: `python -m homelab.controller.remote.reach CLUSTER` prints {node: null or the error}, as JSON.

Run on the head before a supervisor is left there, with the supervisor's own code: what it reaches, the supervisor will.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paramiko

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.load import load_cluster
from homelab.controller.remote.agent import connect
from homelab.controller.remote.fanout import on_all

_NO_KEY = "No authentication methods"  # paramiko's words where no key was found at all (client.py)


def reach(cluster: Cluster) -> dict[str, dict[str, Any] | None]:
    """Log in to every node. `is_login`: the node answers, and no key of ours opens it."""

    def one(name: str) -> None:
        connect(cluster, cluster.node(name)).close()

    reached, errors = on_all([node.name for node in cluster.nodes], one)
    return {**dict.fromkeys(reached), **{name: {**error.as_dict(), "is_login": is_login_refused(error)} for name, error in errors.items()}}


def is_login_refused(error: HomelabError) -> bool:
    """Whether the node answered, and took none of our keys."""
    return isinstance(error.__cause__, paramiko.AuthenticationException) or _NO_KEY in error.message


if __name__ == "__main__":
    sys.stdout.write(json.dumps(reach(load_cluster(Path(sys.argv[1])))) + "\n")
