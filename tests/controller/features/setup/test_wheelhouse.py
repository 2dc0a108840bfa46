"""The packages on the controller: how large they are, and what is said where they cannot be fetched. Real pip."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.setup import wheelhouse
from homelab.controller.features.setup.platform import Platform, platform_of
from homelab.controller.features.setup.requirements import Lock, Package
from homelab.controller.features.setup.wanted import WantedPackages
from tests.controller.features.setup.test_setup_plan import state

pytestmark = pytest.mark.timeout(120)
WHEEL = "a-1.0-py3-none-any.whl"


class OneFile(http.server.BaseHTTPRequestHandler):
    """Says how large one file is, and refuses to send any."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/there" else 404)
        self.send_header("Content-Length", "1234")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


def test_the_size_is_asked_without_fetching(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"four")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneFile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    file = (tmp_path / "b.whl").as_uri()
    try:
        sizes = wheelhouse.sizes_of([f"{base}/there", f"{base}/missing", file, (tmp_path / "none.whl").as_uri(), "not an address"])
    finally:
        server.shutdown()
        server.server_close()
    assert sizes == {f"{base}/there": 1234, file: 4}


def test_what_cannot_be_fetched_is_listed_with_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = Package(name="a", version="1.0", sha256="ab" * 32, wheel=WHEEL, url=(tmp_path / WHEEL).as_uri(), size_bytes=1_500_000)
    platform: Platform = platform_of("n", state(), "3.11")
    with pytest.raises(
        HomelabError, match=r"not on this machine, and cannot be fetched \(1\.5 MB in total\): a 1\.0 \(1\.5 MB\): pip says: "
    ) as refused:
        wheelhouse.fetch(Lock(packages=(package,)), platform)
    assert "homelab setup" in str(refused.value.hint) and not list((tmp_path / "homelab/setup/wheels").glob("*"))


def test_the_first_lock_stays_until_an_upgrade_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = iter(("1.0", "2.0", "3.0"))

    def resolve(*_: object) -> Lock:
        return Lock(packages=(Package(name="a", version=next(versions), sha256="ab" * 32, wheel=WHEEL, url="file:///a.whl", size_bytes=1),))

    monkeypatch.setattr(wheelhouse, "_resolve", resolve)
    wanted, platform = WantedPackages(("a",), None), platform_of("n", state(), "3.11")
    said = [wheelhouse.lock(wanted, platform, anew=anew).versions["a"] for anew in (False, False, True, False)]
    assert said == ["1.0", "1.0", "2.0", "2.0"]
