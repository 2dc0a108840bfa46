"""Which address of a node is its place on the LAN, where it has several."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.cluster import Cluster
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import lan_address

pytestmark = pytest.mark.timeout(20)

CABLE = {"name": "enp3s0", "addresses": ["192.168.1.5/24"]}
WIFI = {"name": "wlp2s0", "kind": "wifi", "addresses": ["192.168.1.6/24"]}
DOCKER = {"name": "docker0", "kind": "virtual", "addresses": ["172.17.0.1/16"]}
TUNNEL = {"name": "tailscale0", "kind": "virtual", "addresses": ["100.90.1.2/32"]}


def place(interfaces: list[dict[str, Any]], *, network: str | None = None, **node: Any) -> tuple[str, str] | None:
    """The choice for a node with these interfaces."""
    data = {"name": "home", "nodes": [{"name": "a", "host": "a.home", **node}, {"name": "b", "host": "b.home"}]}
    if network is not None:
        data["network"] = network
    cluster = Cluster.model_validate(data, strict=False)
    found = lan_address.lan_of(cluster, cluster.node("a"), Facts.model_validate({"node": "a", "network": {"interfaces": interfaces}}))
    return found[:2] if found else None


def test_the_cable_comes_before_wifi() -> None:
    assert place([WIFI, CABLE], network="192.168.1.0/24") == ("192.168.1.5", "enp3s0")
    assert place([WIFI, {**CABLE, "up": False}], network="192.168.1.0/24") == ("192.168.1.6", "wlp2s0")


def test_bridges_of_containers_and_tunnels_are_not_chosen() -> None:
    assert place([DOCKER, TUNNEL, CABLE]) == ("192.168.1.5", "enp3s0")
    assert place([DOCKER, TUNNEL]) is None
    assert place([DOCKER], network="172.16.0.0/12") is None, "not even where the network would fit"


def test_a_tunnel_is_chosen_where_cluster_toml_asks_for_it() -> None:
    assert place([CABLE, TUNNEL], network="100.64.0.0/10") == ("100.90.1.2", "tailscale0")
    assert place([CABLE, TUNNEL], interface="tailscale0") == ("100.90.1.2", "tailscale0")
    assert place([CABLE, TUNNEL], lan_address="100.90.1.2") == ("100.90.1.2", "tailscale0")


def test_the_second_address_of_an_interface_counts() -> None:
    both = {"name": "enp3s0", "addresses": ["10.0.0.7/8", "192.168.1.5/24"]}
    assert place([both], network="192.168.1.0/24") == ("192.168.1.5", "enp3s0")
    assert place([both], lan_address="192.168.1.5") == ("192.168.1.5", "enp3s0")
