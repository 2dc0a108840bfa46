"""From facts to keys."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.cluster import Node
from homelab.controller.facts.network import Interface
from homelab.controller.facts.node import Facts
from homelab.controller.features.discover import proposal

GIB = 1 << 30


def facts(*cards: tuple[str, float | None], networks: tuple[tuple[str, str, str, int | None], ...] = (), **changes: Any) -> Facts:
    gpu = {
        "cards": [
            {"index": number, "name": name, "memory_total_bytes": memory and int(memory * GIB)}
            for number, (name, memory) in enumerate(cards)
        ]
    }
    interfaces = [
        Interface(name=name, kind=kind, addresses=(address,), speed_mbit=speed).model_dump() for name, kind, address, speed in networks
    ]
    return Facts.model_validate({"node": "a", "gpu": gpu, "network": {"interfaces": interfaces}, **changes})


def node(*gpus: dict[str, Any]) -> Node:
    return Node.model_validate({"name": "a", "host": "b", "gpus": list(gpus)})


def test_cards() -> None:
    found = proposal.gpus_of(facts(("NVIDIA GeForce RTX 3070 Ti", 7.996), ("NVIDIA GeForce GTX 1080", 8.0)))
    assert found == ({"model": "RTX 3070 Ti", "vram_gb": 8}, {"model": "GTX 1080", "vram_gb": 8})
    assert proposal.gpus_of(facts(("NVIDIA Something", None))) == proposal.gpus_of(facts()) == ()


SMALL, BIG = {"model": "RTX 3070", "vram_gb": 8}, {"model": "RTX 4090", "vram_gb": 24}
REAL_SMALL, REAL_BIG = ("NVIDIA GeForce RTX 3070", 8.0), ("NVIDIA GeForce RTX 4090", 23.99)


@pytest.mark.parametrize(
    ("gpus", "cards", "changed"),
    [
        ((), (REAL_SMALL,), True),
        ((SMALL,), (REAL_SMALL,), False),
        ((SMALL,), (REAL_BIG,), True),
        ((SMALL,), (REAL_SMALL, REAL_BIG), False),  # a choice
        ((SMALL, BIG), (REAL_SMALL,), True),
        (({**SMALL, "index": 1},), (REAL_BIG,), False),
        ((SMALL,), (), False),
    ],
)
def test_when_the_cards_of_a_file_are_changed(gpus: Any, cards: Any, changed: bool) -> None:
    assert proposal.has_changed_cards(node(*gpus), facts(*cards)) is changed


def test_networks() -> None:
    slow, fast, wifi = (
        ("eth0", "physical", "192.168.1.{}/24", 1000),
        ("eth1", "physical", "10.0.0.{}/24", 10000),
        ("wlan0", "wifi", "192.168.2.{}/24", None),
    )
    docker = ("docker0", "virtual", "172.17.0.{}/16", None)

    def machine(number: int, *links: Any) -> Facts:
        return facts(networks=tuple((name, kind, address.format(number), speed) for name, kind, address, speed in links))

    shared = proposal.shared_networks([machine(1, slow, wifi, fast, docker), machine(2, fast, slow, wifi, docker)])
    assert [one.network for one in shared] == ["10.0.0.0/24", "192.168.1.0/24", "192.168.2.0/24"]
    assert [one.is_wired for one in shared] == [True, True, False] and shared[0].speed_mbit == 10000
    assert [one.network for one in proposal.shared_networks([machine(1, slow, wifi), machine(2, wifi)])] == ["192.168.2.0/24"]
    assert proposal.shared_networks([machine(1, slow)]) == proposal.shared_networks([machine(1, slow), machine(2, fast)]) == []


def test_one_machine_under_two_names() -> None:
    def machine(identity: str | None) -> Facts:
        return facts(resources={"workdir_identity": identity})

    answers = {"a": machine("x"), "b": machine("y"), "c": machine("x"), "d": machine(None), "e": machine(None)}
    assert proposal.same_machines(["a", "b", "c", "d", "e", "off"], answers) == {"c": "a"}


def test_what_a_machine_is_fits_a_comment() -> None:
    said = proposal.about(facts(system={"os": "Odd\n[[nodes]]\x1b[31m", "cpu_count": 4, "memory_total_bytes": 8 * GIB}))
    assert "\n" not in said and "\x1b" not in said and said.endswith("4 cores, 8 GB memory, no NVIDIA card")
