"""Copies between nodes: the real verbs of two nodes on loopback, one of which serves what the other fetches."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from homelab.controller.features.setup import relay
from homelab.controller.features.setup.send import Target
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.node.setup import pieces
from homelab.shared.protocol.errors import Refusal
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(30)
CONTENT = os.urandom(70_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "wheels/a-1.0-py3-none-any.whl"


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The node serves these files; what its first line says."""
    reading, writing = os.pipe()
    said = io.StringIO()
    monkeypatch.setattr("sys.stdin", os.fdopen(reading))
    monkeypatch.setattr("builtins.print", lambda text, **_: said.write(text))
    thread = threading.Thread(target=ask_node, args=("setup-share", {"address": "127.0.0.1", "files": files}))
    thread.start()
    while not said.getvalue():
        assert thread.is_alive()
    try:
        yield json.loads(said.getvalue())
    finally:
        os.close(writing)
        thread.join(10)
        assert not thread.is_alive(), "it ends with its question"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "first"))
    Path(pieces.place(NAME)).parent.mkdir(parents=True)
    Path(pieces.place(NAME)).write_bytes(CONTENT)
    return tmp_path


def test_what_one_node_has_another_fetches(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(monkeypatch, capsys, {SHA256: {"name": NAME}}) as said:
        url = f"http://{said['address']}:{said['port']}/{said['token']}/{SHA256}"
        monkeypatch.setenv("HOME", str(home / "second"))
        have = 0
        while have < len(CONTENT):
            have = ask_node(
                "setup-fetch", {"name": NAME, "sha256": SHA256, "size": len(CONTENT), "offset": have, "most": 30_000, "url": url}
            ).have
        assert Path(pieces.place(NAME)).read_bytes() == CONTENT and str(home / "second") in pieces.place(NAME)


def test_who_knows_no_token_gets_nothing(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(monkeypatch, capsys, {SHA256: {"name": NAME}}) as said:
        for path in (f"/{SHA256}", f"/{'0' * 32}/{SHA256}", f"/{said['token']}/../{SHA256}", f"/{said['token']}/{'0' * 64}", "/etc/passwd"):
            connection = http.client.HTTPConnection(said["address"], said["port"], timeout=5)
            connection.request("GET", path, headers={"Range": "bytes=0-9"})
            assert connection.getresponse().status == 404, path
            connection.close()


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "../../.ssh/id_ed25519"},
        {"name": "../x", "model": "a/b", "commit": "a" * 40},
        {"name": "x", "model": "a/../../b", "commit": "a" * 40},
    ],
)
def test_only_files_of_setup_are_served(home: Path, entry: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        ask_node("setup-share", {"address": "127.0.0.1", "files": {SHA256: entry}})


def test_an_address_that_is_not_the_node_s_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    with pytest.raises(Refusal, match="does not know its address"):
        ask_node("setup-share", {"address": "", "files": {}})
    with pytest.raises(Refusal, match="no other node can copy"):
        ask_node("setup-share", {"address": "203.0.113.7", "files": {}})


class Agent:
    """A node that says this line, or nothing."""

    def __init__(self, line: bytes) -> None:
        self.line, self.is_closed = line, False
        self.node = type("Node", (), {"lan_address": None, "name": "laptop"})()

    def open(self, verb: str, request: dict[str, Any]) -> Any:
        return self

    def readline(self, timeout_s: float) -> bytes:
        return self.line

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"error": {"message": "no"}}', b'{"address": "x; reboot", "port": 1, "token": "00"}', b"\xff"]
)
def test_a_node_that_cannot_share_is_no_error(line: bytes) -> None:
    agent = Agent(line)
    with relay.sharing(
        cast(Any, agent), Target("setup-receive"), [NeededFile(name=NAME, sha256=SHA256, size_bytes=1)], lambda text: None
    ) as addresses:
        assert addresses == {}
    assert agent.is_closed


def test_wifi_is_known_by_the_interface_that_has_the_way(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    assert not relay.is_on_wifi("127.0.0.1", tmp_path)
    (tmp_path / "lo/wireless").mkdir()
    assert relay.is_on_wifi("127.0.0.1", tmp_path) and not relay.is_on_wifi("name.invalid", tmp_path)
