"""How much goes through between the nodes: packets of full size, and bytes per second."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import megabytes
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.network.blame import Pair, address_of, blame, direction, others_of, some
from homelab.controller.checks.network.packet_loss import is_lossy
from homelab.controller.facts.node_commands import as_root, on_node

SLOW_BYTES_PER_S = 30e6  # a quarter of 1 Gbit/s; below it a pair is compared with the others
SLOW_AGAINST_BEST = 3.0
FLOOR_BYTES_PER_S = 3e6  # 10 Mbit/s carry 1.2 MB/s: where no pair has more, there is nothing to compare with
GRADIENT_BYTES = 17e6  # LoRA r=16 of a 7B model in bf16
ETHERNET_MTU = 1500


@check(
    "network.path_mtu", "packets of full size arrive, in both directions of every pair", worst="fail", sees="dials", after="network.loss"
)
def path_mtu(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where large packets vanish between two nodes although connections open: the first gradient would hang."""
    lost = {
        (link.source, link.target): link
        for link in evidence.links
        if link.lost_bytes is not None and not is_lossy(evidence, (link.source, link.target))
    }
    for node, pairs in blame(lost, evidence.head).items():
        size = max(lost[pair].lost_bytes or 0 for pair in pairs)
        carried = min((lost[pair].carried_bytes or 0 for pair in pairs), default=0)
        message = (
            f"packets of {size} bytes {direction(node, pairs)} are lost on the way, those of {carried} bytes arrive: connections open, "
            f"and hang at the first large message"
        )
        yield node, _smaller(evidence, node, message, size, carried)
    stalled = {
        (link.source, link.target): link.stalled
        for link in evidence.links
        if link.stalled and link.carried_bytes is None and link.lost_bytes is None and not is_lossy(evidence, (link.source, link.target))
    }
    for node, pairs in blame(stalled, evidence.head).items():
        message = f"connections {direction(node, pairs)} open, but {stalled[pairs[0]]}: large packets seem to be lost on the way"
        ping = ["ping", "-M", "do", "-s", "1472", "-c", "3", address_of(evidence, others_of(node, pairs)[0])]
        command = on_node(evidence.cluster.node(node), quote_words(ping))
        yield node, Problem("fail", message, f"does its MTU match the switch or the VPN between the nodes? {command}")


def _smaller(evidence: Evidence, node: str, message: str, size: int, carried: int) -> Problem:
    """The MTU that arrives is set on the blamed node; TCP tells it to the other end of every connection."""
    facts = evidence.facts.get(node)
    if facts is None or node not in evidence.lan:
        return Problem("fail", message, f"set the MTU of {node} to {carried}")
    interface = evidence.lan[node][1]
    mtu = ETHERNET_MTU if size > ETHERNET_MTU and carried >= ETHERNET_MTU else carried
    fix = as_root(evidence.cluster.node(node), facts, quote_words(["ip", "link", "set", "dev", interface, "mtu", str(mtu)]))
    why = (
        "the switch passes no jumbo frames"
        if size > ETHERNET_MTU
        else "a VPN, a bridge or a switch on the way has a smaller MTU than its interface"
    )
    return Problem("fail", message, Hint("{}: {} (until the next start; then in its network settings)", why, fix), fix)


@check("network.throughput", "the network is about equally fast between all nodes", worst="fail", sees="dials", after="network.path_mtu")
def throughput(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where bytes do not arrive at all, warn where a wire is far slower than another one, or all are as slow as 10 Mbit/s."""
    stalled = {
        (link.source, link.target): link.stalled
        for link in evidence.links
        if link.stalled
        and link.carried_bytes is not None
        and link.lost_bytes is None
        and not is_lossy(evidence, (link.source, link.target))
    }
    for node, pairs in blame(stalled, evidence.head).items():
        message = f"connections {direction(node, pairs)} open, but {stalled[pairs[0]]}"
        yield node, Problem("fail", message, _offload(evidence, node))
    slow = {pair for pair in thin(evidence.throughputs) if not is_lossy(evidence, pair)}
    for node, pairs in blame(slow, evidence.head).items():
        yield node, _slow_wire(evidence, node, pairs)
    best = max(evidence.throughputs.values(), default=0.0)
    if 0 < best < FLOOR_BYTES_PER_S:
        count = len(evidence.lan)
        seconds = 2 * (count - 1) / max(1, count) * GRADIENT_BYTES / best
        message = f"no pair of nodes has more than {megabytes(best, '.2g')} MB/s, as on wires of 10 Mbit/s: "
        message += f"a gradient of {megabytes(GRADIENT_BYTES, '.0f')} MB takes {seconds:.0f} s in every step"
        first = next(iter(evidence.lan), evidence.head)
        yield ("", Problem("warn", message, f"change the switch or the cables; is it all Wi-Fi? {_speed_command(evidence, first)}"))


def _offload(evidence: Evidence, node: str) -> str:
    """What swallows data and lets the handshake through: a card's driver that puts segments together wrongly, or a firewall that looks into them."""
    facts = evidence.facts.get(node)
    if facts is None or node not in evidence.lan:
        return homelab("preflight --only network")
    words = ["ethtool", "-K", evidence.lan[node][1], "tso", "off", "gso", "off", "gro", "off"]
    return f"does a firewall inspect the packets, or does the offloading of the network card damage them? {as_root(evidence.cluster.node(node), facts, quote_words(words))}"


def thin(measured: dict[Pair, float]) -> set[Pair]:
    """Pairs whose wire is slow and far slower than another one of this cluster: every step of the training waits for the slowest."""
    best = max(measured.values(), default=0.0)
    return {pair for pair, rate in measured.items() if rate < SLOW_BYTES_PER_S and rate * SLOW_AGAINST_BEST < best}


def _slow_wire(evidence: Evidence, node: str, pairs: list[Pair]) -> Problem:
    rates = evidence.throughputs
    slowest = min(pairs, key=lambda pair: (rates[pair], pair))
    message = f"{megabytes(rates[slowest], '.2g')} MB/s between it and {some(others_of(node, pairs))}"
    back = [rates[target, source] for source, target in pairs if (target, source) in rates and (target, source) not in pairs]
    if len(back) == len(pairs):  # every one of them is well in the other direction
        message = f"{megabytes(rates[slowest], '.2g')} MB/s {direction(node, pairs)}, and {megabytes(min(back), '.3g')} MB/s the other way"
    message += f"; the best pair has {megabytes(max(rates.values()), '.3g')} MB/s, and all nodes wait for the slowest"
    return Problem(
        "warn", message, f"change its cable or its port at the switch; is it on Wi-Fi? To see its speed: {_speed_command(evidence, node)}"
    )


def _speed_command(evidence: Evidence, node: str) -> str:
    interface = evidence.lan[node][1] if node in evidence.lan else "eth0"
    return on_node(evidence.cluster.node(node), quote_words(["cat", f"/sys/class/net/{interface}/speed"]))
