"""A node fetches a file by itself: in parts, from where it ended, and only what it was promised."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from homelab.node.setup import pieces, record
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.setup_messages import SetupReceived
from tests.fakes import ask_node
from tests.servers import serving

pytestmark = pytest.mark.timeout(30)
CONTENT = bytes(range(256)) * 40
NAME = "wheels/a-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "index").mkdir()
    (tmp_path / "index/a.whl").write_bytes(CONTENT)
    return tmp_path


def question(url: str, offset: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "name": NAME,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
        "offset": offset,
        "most": 4096,
        "url": url,
        **changes,
    }


def all_of(url: str, **changes: Any) -> list[int]:
    """What the node has after every question, until the file is whole or ten were asked."""
    had = [0]
    while had[-1] < len(CONTENT) and len(had) < 10:
        had.append(ask_node("setup-fetch", question(url, had[-1], **changes)).have)
    return had


def test_parts_become_the_file(own_home: Path) -> None:
    with serving(own_home / "index") as server:
        assert all_of(f"{server.address}/a.whl") == [0, 4096, 8192, 10240]
        assert [part for _, _, part in server.asked] == ["bytes=0-4095", "bytes=4096-8191", "bytes=8192-10239"]
    assert Path(pieces.place(NAME)).read_bytes() == CONTENT and record.folder() in record.read()["folders"]


def test_what_broke_off_goes_on_and_what_is_not_the_file_begins_anew(own_home: Path) -> None:
    with serving(own_home / "index") as server:
        server.breaks_after = 1000
        assert all_of(f"{server.address}/a.whl")[:3] == [0, 1000, 2000]
        server.breaks_after = None
        (own_home / "index/a.whl").write_bytes(CONTENT[:-1] + b"?")
        assert 0 in all_of(f"{server.address}/a.whl", most=1 << 20)[1:]
    assert not Path(pieces.place(NAME)).exists()


def test_a_server_without_parts_is_asked_for_whole_files_only(own_home: Path) -> None:
    with serving(own_home / "index") as server:
        server.knows_parts = False
        with pytest.raises(Refusal, match="parts of files"):
            ask_node("setup-fetch", question(f"{server.address}/a.whl"))
        assert ask_node("setup-fetch", question(f"{server.address}/a.whl", most=1 << 20)) == SetupReceived(have=len(CONTENT))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/a", "/etc/passwd"])
def test_only_the_network_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="not an address on a network"):
        ask_node("setup-fetch", question(url))


def test_who_does_not_answer_is_named(own_home: Path) -> None:
    with serving(own_home / "index") as server:
        with pytest.raises(Refusal, match="Not Found") as missing:
            ask_node("setup-fetch", question(f"{server.address}/b.whl"))
        gone = server.address
    with pytest.raises(Refusal, match="cannot be fetched") as refused:
        ask_node("setup-fetch", question(f"{gone}/a.whl"))
    assert refused.value.kind == missing.value.kind == "silent" and refused.value.where == f"{gone}/a.whl"


def test_the_proxy_of_the_node_is_used(own_home: Path) -> None:
    # it was asked for http://index.invalid/a.whl, as a proxy is
    with serving(own_home / "index") as proxy, pytest.raises(Refusal, match="Not Found"):
        ask_node("setup-fetch", question("http://index.invalid/a.whl", proxies={"http": proxy.address}))
