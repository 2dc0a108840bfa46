"""A person's proxy is not asked for the servers of tests, which are on this machine."""

from __future__ import annotations

import http.server
import threading
import urllib.request

import pytest


@pytest.mark.timeout(30)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_a_test_is_asked_itself(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://{host}:{server.server_port}/", timeout=10) as answer:
            assert answer.status == 200
        server.shutdown()
