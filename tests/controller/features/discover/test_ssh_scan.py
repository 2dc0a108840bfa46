"""The scan of a small network of this machine's own loopback."""

from __future__ import annotations

import socket

import pytest

from homelab.controller.features.discover import sources

pytestmark = pytest.mark.timeout(30)


def test_who_listens_is_in_the_list() -> None:
    with socket.create_server(("127.77.3.5", 0)) as server:
        assert sources.listening("127.77.3.0/29", server.getsockname()[1]) == ["127.77.3.5"]


def test_a_large_network_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 256"):
        sources.listening("127.0.0.0/16")
