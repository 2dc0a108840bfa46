"""A hub on loopback: the answers of huggingface.co to `datasets` and huggingface_hub, for data sets and models whose files are given here.

Whoever uses it is a process of its own with `HF_ENDPOINT`: both libraries read that when they are imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves until `close`. `commits` of a data set or a model, oldest first, are what `push` has given; `main` is the newest."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.asked: list[str] = []
        self.sent_bytes = 0
        self.gated: set[str] = set()  # who asks for a file of these gets 403
        self.status: dict[str, int] = {}  # what is answered to every question about this name
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def push(self, name: str, files: Mapping[str, str | bytes]) -> str:
        """A new commit with these files; its sha."""
        content = {path: text if isinstance(text, bytes) else text.encode() for path, text in files.items()}
        sums = {path: hashlib.sha1(each).hexdigest() for path, each in content.items()}
        sha = hashlib.sha1(json.dumps([name, sums, len(self.commits.get(name, {}))]).encode()).hexdigest()
        self.commits.setdefault(name, {})[sha] = content
        return sha

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.commits.get(name, {})
        sha = list(commits)[-1] if commits and revision == "main" else revision
        return (sha, commits[sha]) if sha in commits else None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of GET or HEAD."""
        self.asked.append(path)
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        place = parts[1:] if parts[0] == "datasets" else parts  # models have no folder of their own
        asked = "/".join(parts[2:4] if parts[0] == "api" else place[:2])
        if asked in self.status:
            return self.status[asked], {}, b""
        if asked in self.gated and parts[0] != "api":
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {asked} is restricted"}, b""
        if place[2:3] == ["resolve"]:
            found = self._find("/".join(place[:2]), place[3])
            if found is None:
                return _missing("RevisionNotFound" if "/".join(place[:2]) in self.commits else "RepoNotFound")
            sha, files = found
            content = files.get("/".join(place[4:]))
            if content is None:
                return _missing("EntryNotFound", sha)
            return 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content
        if parts[:2] in (["api", "datasets"], ["api", "models"]):
            name, verb, revision = "/".join(parts[2:4]), (parts[4:] or ["revision"])[0], (parts[5:] or ["main"])[0]
            found = self._find(name, revision)
            if found is None:
                return _missing("RevisionNotFound" if name in self.commits else "RepoNotFound")
            sha, files = found
            entries = [_entry(path, content) for path, content in files.items()]
            below = "/".join(parts[6:])
            if verb == "tree":
                return _json([entry for entry in entries if entry["path"].startswith(below)])
            if verb == "paths-info":
                return _json(entries)
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            return _json({"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0})
        return _missing("EntryNotFound")

    def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _say(self) -> None:
                wanted: list[str] | None = None
                if self.command == "POST":
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    form = json.loads(body) if body.startswith(b"{") else {}
                    wanted = form.get("paths") or [unquote(part[6:]) for part in body.decode().split("&") if part.startswith("paths=")]
                status, headers, content = hub.answer(self.path)
                if wanted is not None and status == 200:
                    content = json.dumps([entry for entry in json.loads(content) if entry["path"] in wanted]).encode()
                first, last = 0, len(content) - 1
                if status == 200 and (span := self.headers.get("Range")) and content:
                    first, _, end = span.removeprefix("bytes=").partition("-")
                    first, last = int(first), min(last, int(end) if end else last)
                    status, headers = 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(max(0, last - first + 1)))
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(ConnectionError):  # who asked has seen enough
                        for start in range(first, last + 1, 1 << 16):
                            hub.sent_bytes += self.wfile.write(content[start : min(start + (1 << 16), last + 1)])

            do_GET = do_HEAD = do_POST = _say

            def log_message(self, *words: Any) -> None:
                pass

        return Handler


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _missing(code: str, sha: str = "") -> tuple[int, dict[str, str], bytes]:
    return 404, {"X-Error-Code": code, **({"X-Repo-Commit": sha} if sha else {})}, b""
