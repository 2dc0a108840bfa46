"""Nodes that sleep: what is remembered of them, the packet that wakes them, and what is said where it does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, SilentError, UnreachableError
from homelab.controller.facts.network import Interface
from homelab.controller.features.wake import sleepers, wake
from homelab.controller.features.wake.sleepers import Sleeper
from homelab.controller.remote import fanout
from homelab.node.system import ports
from homelab.shared.protocol import magic_packet
from homelab.shared.protocol.network_messages import PacketSent, WakeRequest
from tests import builders
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(30)
MAC = "2c:f0:5d:00:11:22"
CARD = Interface(name="enp3s0", addresses=("192.168.1.10/24",), mac=MAC, wakes=True)
LOOPBACK = "127.0.0.0/8"


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What a card in the network 127.0.0.0/8 hears."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.settimeout(10)
        listening.bind(("127.255.255.255", 0))
        send = magic_packet.send
        monkeypatch.setattr(magic_packet, "send", lambda mac, network: send(mac, network, listening.getsockname()[1]))
        yield listening


def remember(name: str = "laptop", **changes: Any) -> Sleeper:
    cluster = builders.cluster()
    facts = builders.facts(name)
    card = CARD.model_copy(update={"addresses": (f"{builders.address_of(name)}/24",)} | changes)
    facts = facts.model_copy(update={"network": facts.network.model_copy(update={"interfaces": (card,)})})
    sleepers.remember(cluster.nodes, {name: facts}, {name: (builders.address_of(name), "enp3s0")})
    sleeper = sleepers.recall(cluster.node(name))
    assert sleeper is not None
    return sleeper


def test_the_packet_is_that_of_the_paper_and_arrives(listener: socket.socket) -> None:
    assert ask_node("wake", {"mac": MAC, "network": LOOPBACK}) == PacketSent(sent=True)
    assert listener.recv(200) == bytes.fromhex("ff" * 6 + "2cf05d001122" * 16)
    assert not magic_packet.is_in("203.0.113.0/24") and ask_node("wake", {"mac": MAC, "network": "203.0.113.0/24"}) == PacketSent(
        sent=False
    )
    for odd in ("2c:f0:5d:00:11", "", "zz:f0:5d:00:11:22"):
        with pytest.raises(ValueError):
            magic_packet.packet(odd)


def test_a_card_and_its_setting_are_read_from_the_kernel(tmp_path: Path) -> None:
    for name, address, state in (
        ("enp3s0", "2C:F0:5D:00:11:22\n", "enabled\n"),
        ("eth1", MAC, "disabled\n"),
        ("lo", "00:00:00:00:00:00", ""),
        ("wg0", "", ""),
    ):
        (tmp_path / name / "device/power").mkdir(parents=True)
        (tmp_path / name / "address").write_text(address)
        (tmp_path / name / "device/power/wakeup").write_text(state)
    told = {name: ports.wake_up(name, str(tmp_path)) for name in ("enp3s0", "eth1", "lo", "wg0", "none")}
    assert told["enp3s0"] == {"mac": MAC, "wakes": True} and told["eth1"]["wakes"] is False
    assert [told[name] for name in ("lo", "wg0", "none")] == [{"mac": None, "wakes": None}] * 3


def test_what_is_remembered_is_the_card_in_the_lan_and_nothing_odd() -> None:
    assert remember() == Sleeper(mac=MAC, network="192.168.1.0/24", interface="enp3s0", kind="physical", wakes=True)
    assert sleepers.recall(builders.cluster().node("tower")) is None
    assert (
        sleepers.of_facts((CARD,), "192.168.1.10", "other") is None
        and sleepers.of_facts((CARD.model_copy(update={"mac": None}),), "192.168.1.10", "enp3s0") is None
    )
    with pytest.raises(ValueError):
        Interface.model_validate({"name": "x", "mac": "$(reboot)"})
    sleepers._path().write_text(f'{{"{builders.address_of("laptop")}:22": {{"mac": 3}}}}')
    assert sleepers.recall(builders.cluster().node("laptop")) is None
    sleepers._path().write_text("{")
    assert remember().mac == MAC


class Machines:
    """Which nodes answer; a packet switches on the machine whose card it names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, off: dict[str, HomelabError], *, network: bool = True, works: bool = True) -> None:
        self.off, self.works = dict(off), works
        self.sent: list[str] = []
        monkeypatch.setattr(wake, "connect", self.connect)
        monkeypatch.setattr(fanout.Fleet, "agent", self.agent)
        monkeypatch.setattr(magic_packet, "is_in", lambda _: network)
        monkeypatch.setattr(magic_packet, "send", self.send)
        monkeypatch.setattr(wake, "_PAUSE_S", 0.01)

    def connect(self, cluster: Any, node: Any) -> Any:
        if node.name in self.off:
            raise self.off[node.name]
        return type("Agent", (), {"close": lambda self: None})()

    def agent(self, name: str) -> Any:
        raise silent(name)

    def send(self, mac: str, network: str) -> None:
        self.sent.append(mac)
        if self.works:
            self.off.clear()


def silent(name: str) -> SilentError:
    return SilentError("no answer", where=f"node {name}", hint="wake it")


def woken(names: tuple[str, ...] = builders.NAMES, **options: Any) -> tuple[dict[str, str], dict[str, HomelabError]]:
    done, errors = wake.wake(builders.cluster(), names, lambda _: None, **options)
    return {name: entry.state for name, entry in done.items()}, errors


def test_only_who_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    machines = Machines(monkeypatch, {"laptop": silent("laptop")})
    assert woken() == ({"tower": "awake", "laptop": "woken", "oldtower": "awake"}, {}) and machines.sent == [MAC]


def test_a_node_that_refuses_the_login_is_awake_and_a_name_that_only_its_owner_announces_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    refused, unknown_name = (
        UnreachableError("the login was refused", where="w", hint="h"),
        UnreachableError("no such name", where="w", hint="h"),
    )
    unknown_name.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    Machines(monkeypatch, {"tower": refused, "laptop": unknown_name})
    assert woken() == ({"tower": "awake", "laptop": "woken", "oldtower": "awake"}, {})


def test_who_was_never_asked_and_who_does_not_wake_are_errors_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(wakes=False)
    machines = Machines(monkeypatch, {"tower": silent("tower"), "laptop": silent("laptop")}, works=False)
    states, errors = woken(limit_s=0.2)
    assert states == {"tower": "unknown", "laptop": "silent", "oldtower": "awake"} and machines.sent
    assert "its network card is not known here" in errors["tower"].message and "switch tower on by hand" in str(errors["tower"].hint)
    assert "its network card was not set up to wake it" in errors["laptop"].message and "ethtool -s enp3s0 wol g" in str(
        errors["laptop"].hint
    )


def test_nodes_that_are_not_named_help_where_they_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    machines = Machines(monkeypatch, {"laptop": silent("laptop"), "oldtower": silent("oldtower")}, network=False)
    asked: list[str] = []

    def agent(_: object, name: str) -> Any:
        asked.append(name)
        machines.off.pop("laptop", None)
        return type("Agent", (), {"ask": lambda *_: {"sent": True}})()

    monkeypatch.setattr(fanout.Fleet, "agent", agent)
    assert woken(("laptop",)) == ({"laptop": "woken"}, {}) and asked == ["tower"]


def test_another_node_of_that_network_sends_where_this_machine_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    sleeper = Sleeper(mac=MAC, network="203.0.113.0/24", interface="enp3s0", kind="physical")
    asked: list[tuple[str, str, Any]] = []

    class Fleet:
        def agent(self, name: str) -> Any:
            def ask(_: object, verb: str, request: WakeRequest) -> dict[str, Any]:
                asked.append((name, verb, request))
                return {"sent": name == "oldtower"}

            return type("Agent", (), {"ask": ask})()

    assert wake._send(Fleet(), sleeper, ["tower", "oldtower"]) == "oldtower"  # type: ignore[arg-type]
    assert asked[-1] == ("oldtower", "wake", WakeRequest(mac=MAC, network="203.0.113.0/24"))
    assert wake._send(Fleet(), sleeper, ["tower"]) is None  # type: ignore[arg-type]
    here = sleeper.model_copy(update={"network": LOOPBACK})
    assert wake._send(Fleet(), here, ["oldtower"]) == "this machine and oldtower", "it may be in another network of these addresses"  # type: ignore[arg-type]
    assert "no machine can wake it" in wake._not_in_its_network(builders.cluster().node("laptop"), sleeper).message
