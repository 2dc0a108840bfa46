"""What anybody on the LAN may announce: a name of any letters, and names that nobody answers for."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from homelab.controller.features.discover import sources


class _Error(Exception):
    """zeroconf.Error, of which BadTypeInNameException is one (zeroconf/_exceptions.py)."""


def network(monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]) -> list[str]:
    """A zeroconf on whose LAN these names are announced; the value is an address, seconds of silence, or what is raised."""
    asked: list[str] = []

    class Zeroconf:
        def __init__(self, ip_version: object) -> None: ...
        def __enter__(self) -> Zeroconf:
            return self

        def __exit__(self, *_: object) -> None: ...
        def get_service_info(self, service: str, name: str, timeout: int) -> object:
            asked.append(name)
            said = names[name]
            if isinstance(said, Exception):
                raise said
            if isinstance(said, float):
                time.sleep(min(said, timeout / 1000))
                return None
            return SimpleNamespace(port=2222, parsed_addresses=lambda version: [said])

    def browser(network: object, service: str, handlers: list[Any]) -> object:
        for name in names:
            handlers[0](network, service, name, None)
        return SimpleNamespace(join=lambda seconds: None)

    module = ModuleType("zeroconf")
    module.__dict__.update(
        Zeroconf=Zeroconf, ServiceBrowser=browser, Error=_Error, IPVersion=SimpleNamespace(V4Only=4), ServiceStateChange=object
    )
    monkeypatch.setitem(sys.modules, "zeroconf", module)
    return asked


def of(label: str) -> str:
    return f"{label}._ssh._tcp.local."


@pytest.mark.parametrize("bad", ["a\x07b", "a\nb", "\x1b]52;c;aGk=\x07", "‮evil"])
def test_a_name_with_control_letters_is_not_even_asked_for(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = network(monkeypatch, {of(bad): _Error("Bad type"), of("tower"): "192.168.1.7"})
    (found,) = sources.from_mdns(lambda text: None)
    assert (found.name, found.port) == ("tower", 2222) and asked == [of("tower")]


@pytest.mark.parametrize(
    "error", [_Error("BadTypeInNameException"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), ValueError("an address")]
)
def test_a_name_that_zeroconf_refuses_ends_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    network(monkeypatch, {of("a" * 70): error, of("tower"): "192.168.1.7"})
    assert [found.name for found in sources.from_mdns(lambda text: None)] == ["tower"]


def test_ghosts_hold_nobody_up_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MDNS_ANSWER_MS", 300)
    asked = network(monkeypatch, {of("tower"): "192.168.1.7", **{of(f"ghost{number}"): 30.0 for number in range(500)}})
    began = time.monotonic()
    assert [found.name for found in sources.from_mdns(lambda text: None)] == ["tower"]
    assert len(asked) == sources._MOST_NAMES and time.monotonic() - began < 0.3 * 20, "one limit for all, not one for each"
