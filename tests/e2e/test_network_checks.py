"""Faults of the network that three isolated nodes really have: each is found on its node, and the proposed command fixes it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.config.load import load_cluster
from homelab.controller.features.preflight import gather
from homelab.controller.remote.fanout import Fleet
from homelab.lab import Lab, network
from scripts.practice.misconfigurations import cables
from tests.lab.conftest import namespaces_missing

pytestmark = [pytest.mark.timeout(120), pytest.mark.namespaces]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three nodes with a wire of 1 Gbit/s."""
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    with Lab.up(tmp_path_factory.mktemp("wires") / "lab", nodes=3, backend="namespaces", rate="1gbit") as started:
        yield started


def seen_in(lab: Lab) -> Evidence:
    """Facts and dials of all nodes."""
    with Fleet(load_cluster(lab.cluster_file)) as fleet:
        return gather.evidence(fleet, recipe=None, material=[], port=29500)


def found_in(lab: Lab) -> list[Finding]:
    """What the checks of the network find."""
    findings = registry.judge_all(seen_in(lab))
    return [finding for finding in findings if finding.subject == "network" and finding.level != "ok"]


@contextmanager
def rule(lab: Lab, node: str, text: str, hook: str = "input") -> Iterator[None]:
    """A rule of nftables on what comes in, or goes out."""
    space = str(network.NAMESPACES / lab.state.node(node).network_namespace)
    nft = ["nsenter", f"--net={space}", "nft"]
    table = f"table inet fault {{\n chain {hook} {{\n type filter hook {hook} priority 0;\n {text}\n }}\n}}\n"
    subprocess.run([*nft, "-f", "-"], input=table, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "inet", "fault"], check=True)


def test_healthy_nodes_are_measured_in_every_direction_and_nothing_is_found(lab: Lab) -> None:
    evidence = seen_in(lab)
    assert [finding for finding in registry.judge_all(evidence) if finding.subject == "network" and finding.level != "ok"] == []
    pairs = {(source, target) for source in evidence.lan for target in evidence.lan if source != target}
    assert len(pairs) == 6 and set(evidence.throughputs) == pairs
    assert {(link.source, link.target) for link in evidence.links if link.carried_bytes == 1500} == pairs
    assert {link.port for link in evidence.links if link.is_rendezvous} == {29500}
    assert len(evidence.links) == 8 * 6 + 2
    # 1 Gbit/s are 125 MB/s. A node that gets no CPU time for a moment counts less, or more of what has gathered meanwhile.
    rounds = [evidence.throughputs]
    while not all(any(20e6 < rates[pair] < 160e6 for rates in rounds) for pair in pairs) and len(rounds) < 5:
        rounds.append(seen_in(lab).throughputs)
    assert all(any(20e6 < rates[pair] < 160e6 for rates in rounds) for pair in pairs), rounds


def test_a_firewall_on_ephemeral_ports_is_found_in_seconds_and_the_line_for_it_mends_it(lab: Lab) -> None:
    with rule(lab, "node2", "ct state new tcp dport 32768-60999 drop"):
        started = time.monotonic()
        (finding,) = found_in(lab)
        assert time.monotonic() - started < 60, "alone it is 3 s; each port that drops in turn would be minutes"
        assert (finding.check, finding.node, finding.level) == ("network.reach", "node2", "fail")
        assert "no connection from node1 and node3" in finding.message and "nft insert rule inet fault input" in finding.fix
        subprocess.run(["sh", "-c", finding.fix], check=True, timeout=20)
        assert found_in(lab) == []


def test_a_firewall_on_the_way_out_is_found_on_the_node_that_has_it_and_the_line_for_it_mends_it(lab: Lab) -> None:
    peer = lab.state.node("node3").host
    with rule(lab, "node2", f"ip daddr {peer} tcp dport != 22 ct state new reject with tcp reset", "output"):
        (finding,) = found_in(lab)
        assert (finding.check, finding.node, finding.level) == ("network.reach", "node2", "fail")
        assert "it cannot open connections to node3" in finding.message and "nft insert rule inet fault output ip daddr" in finding.fix
        subprocess.run(["sh", "-c", finding.fix], check=True, timeout=20)
        assert found_in(lab) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("percent", "level"), [(5, "warn"), (20, "fail")])
def test_packets_that_are_lost_are_called_so_and_nothing_else_is_blamed(lab: Lab, percent: int, level: str) -> None:
    with cables.losing(lab, "node2", percent, to="node1"):
        (finding,) = found_in(lab)
    assert (finding.check, finding.node, finding.level) == ("network.loss", "node1", level)
    assert "of the packets from node2 are lost" in finding.message


def test_large_packets_that_vanish_are_found_and_a_smaller_mtu_mends_it(lab: Lab) -> None:
    switch = ["nsenter", f"--net={network.NAMESPACES / network.switch_namespace(lab.state)}", "ip", "link", "set"]
    port = network.switch_port(lab.state.node("node3"))
    subprocess.run([*switch, port, "mtu", "1400"], check=True)
    try:
        (finding,) = found_in(lab)
        assert (finding.check, finding.node, finding.level) == ("network.path_mtu", "node3", "fail")
        assert "packets of 1500 bytes between it and node1 and node2 are lost on the way, those of 1400" in finding.message
        subprocess.run(["sh", "-c", finding.fix], check=True, timeout=20)
        assert [left.check for left in found_in(lab)] == ["network.mtu"], "it differs from the others now, and all arrives"
    finally:
        node = f"--net={network.NAMESPACES / lab.state.node('node3').network_namespace}"
        subprocess.run(["nsenter", node, "ip", "link", "set", network.INTERFACE, "mtu", "1500"], check=True)
        subprocess.run([*switch, port, "mtu", "1500"], check=True)
