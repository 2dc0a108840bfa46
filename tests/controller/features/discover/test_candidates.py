"""What the sources say, from recorded answers, and which candidates are one machine."""

from __future__ import annotations

import json

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.features.discover import candidates
from homelab.controller.features.discover.candidates import ARGUMENT, NEIGHBOUR, SSH_CONFIG, Candidate, Greeting


def test_neighbours() -> None:
    text = json.dumps(
        [
            {"dst": "192.168.1.20", "dev": "eth0", "lladdr": "00:11", "state": ["STALE"]},
            {"dst": "192.168.1.7", "dev": "eth0", "lladdr": "00:12", "state": ["REACHABLE"]},
            {"dst": "192.168.1.9", "dev": "eth0", "state": ["FAILED"]},
            {"dst": "172.17.0.2", "dev": "docker0", "state": ["REACHABLE"]},
            {"dst": "fe80::1", "dev": "eth0", "state": ["REACHABLE"]},
            "damaged",
        ]
    )
    assert [one.host for one in candidates.from_neighbours(text)] == ["192.168.1.7", "192.168.1.20"]
    assert candidates.from_neighbours("no json") == candidates.from_neighbours("{}") == []


def test_tailscale() -> None:
    peer = {"HostName": "tower", "TailscaleIPs": ["100.64.0.7", "fd7a::7"], "Online": True, "OS": "linux"}
    peers = {"a": peer, "b": {**peer, "Online": False}, "c": {**peer, "OS": "iOS"}, "d": {**peer, "TailscaleIPs": None}, "e": 3}
    (found,) = candidates.from_tailscale(json.dumps({"Peer": peers, "Self": peer}))
    assert (found.host, found.name) == ("100.64.0.7", "tower")
    assert candidates.from_tailscale('{"Peer": null}') == candidates.from_tailscale("") == []


def test_own_networks() -> None:
    def interface(name: str, local: str, link: str = "ether") -> dict[str, object]:
        return {
            "ifname": name,
            "link_type": link,
            "addr_info": [{"family": "inet", "local": local, "prefixlen": 16}, {"family": "inet6", "local": "fe80::1"}],
        }

    text = json.dumps([interface("lo", "127.0.0.1", "loopback"), interface("eth0", "192.168.4.9"), interface("docker0", "172.17.0.1")])
    assert [str(network) for network in candidates.own_networks(text)] == ["192.168.4.0/24"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("tower", ("tower", None, None)), ("me@tower:2222", ("tower", "me", 2222)), ("192.0.2.1", ("192.0.2.1", None, None))],
)
def test_arguments(word: str, expected: tuple[str, str | None, int | None]) -> None:
    found = candidates.from_argument(word)
    assert (found.host, found.user, found.port) == expected


@pytest.mark.parametrize("word", ["", "-oProxyCommand=x", "a b", "tower:", "tower:x", "tower:99999", "$(x)", "local"])
def test_arguments_that_name_no_machine(word: str) -> None:
    with pytest.raises(InputError, match="names no machine"):
        candidates.from_argument(word)


def test_forges() -> None:
    assert candidates.is_forge("github.com", "me") and candidates.is_forge("192.0.2.1", "git") and not candidates.is_forge("tower", "me")


def greeting(host: str, key: str, address: str = "", source: str = SSH_CONFIG, port: int = 22) -> Greeting:
    return Greeting(Candidate(host, source), address or host, port, "me", key)


def test_one_key_or_one_place_is_one_machine() -> None:
    found = [
        greeting("tower", "A"),
        greeting("192.0.2.1", "A"),
        greeting("pi", ""),
        greeting("pi.local", "", "pi"),
        greeting("nas", "B"),
        greeting("vm", "C", "nas", port=23),
    ]
    kept, others = candidates.one_each(found)
    assert [one.candidate.host for one in kept] == ["tower", "pi", "nas", "vm"]
    assert others == {"192.0.2.1": "tower", "pi.local": "pi"}


def test_which_are_expected() -> None:
    assert greeting("tower", "A", "192.168.1.2").is_expected and greeting("a.lan", "A").is_expected
    assert not greeting("vps", "A", "8.8.8.8").is_expected and not greeting("192.168.1.2", "A", source=NEIGHBOUR).is_expected
    assert greeting("vps", "A", "8.8.8.8", source=ARGUMENT).is_expected


@pytest.mark.parametrize(
    ("candidate", "hostname", "name"),
    [
        (Candidate("192.0.2.1", NEIGHBOUR), "tower.lan", "tower"),
        (Candidate("192.0.2.1", NEIGHBOUR), "", "192.0.2.1"),
        (Candidate("192.0.2.1", NEIGHBOUR), "localhost", "192.0.2.1"),
        (Candidate("x", SSH_CONFIG, name="old box"), "", "x"),
        (Candidate("laptop", SSH_CONFIG, name="laptop"), "other", "laptop-2"),
    ],
)
def test_names(candidate: Candidate, hostname: str, name: str) -> None:
    assert candidates.name_for(candidate, hostname, {"laptop"}) == name


def test_each_place_once_and_none_that_is_there() -> None:
    found = [Candidate("a", SSH_CONFIG), Candidate("a", NEIGHBOUR, port=22), Candidate("b", NEIGHBOUR), Candidate("-x", NEIGHBOUR)]
    assert candidates.distinct(found, {("b", 22)}) == found[:1]
