"""Whether packets arrive on the way between two nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.shell import quote_words
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.network.blame import Pair, blame, direction
from homelab.controller.facts.node_commands import on_node

FAIL_LOSS = 0.1  # connections no longer open reliably; with less the training runs, and waits


@check("network.loss", "no packets are lost between two nodes, in either direction", worst="fail", sees="dials", after="network.port")
def loss(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """Where packets of any size are lost on the way: fail for one in ten and more, else a warning."""
    losses = evidence.losses
    for node, pairs in blame(losses, evidence.head).items():
        shares = [losses[pair] for pair in pairs]
        least, most = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
        share = f"{most} %" if least == most else f"{least} to {most} %"
        back = "" if any((target, source) in losses for source, target in pairs) else ", and none the other way"
        message = f"{share} of the packets {direction(node, pairs)} are lost on the way, also small ones{back}: each lost packet makes all nodes wait"
        command = ["ip", "-s", "link", "show", "dev", evidence.lan[node][1] if node in evidence.lan else "eth0"]
        hint = (
            "change its cable, then its port at the switch; is it on Wi-Fi, a VPN or a power-line adapter? To see the counters of its network card: "
            f"{on_node(evidence.cluster.node(node), quote_words(command))}"
        )
        yield node, Problem("fail" if max(shares) >= FAIL_LOSS else "warn", message, hint)


def is_lossy(evidence: Evidence, pair: Pair) -> bool:
    """Whether packets are lost between these two, in any direction: then a packet that is missing proves nothing else."""
    losses = evidence.losses
    return pair in losses or (pair[1], pair[0]) in losses
