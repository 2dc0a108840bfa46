"""Collect the facts of all nodes of a cluster file over SSH and print how many answered: the whole process is timed.

python ours.py CLUSTER_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from homelab.controller.config.load import load_cluster
from homelab.controller.planning.machines import lan_address
from homelab.controller.remote.fanout import Fleet


def main() -> int:
    """Ask every node once. Returns 1 when one did not answer."""
    cluster = load_cluster(Path(sys.argv[1]))
    with Fleet(cluster) as fleet:
        answers, errors = fleet.ask("facts", lambda node: {"peers": lan_address.peers_of(cluster, node.name), "port": 29500})
    print(
        f"{len(answers)} nodes, {sum(len(field) if isinstance(field, dict) else 1 for answer in answers.values() for field in answer.values())} facts"
    )
    for name, error in errors.items():
        print(f"{name}: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
