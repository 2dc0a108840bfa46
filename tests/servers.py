"""A web server of a folder that answers questions for parts of files, as package indexes do."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Parts(http.server.BaseHTTPRequestHandler):
    """`folder`, `asked` and `breaks_after` are the server's: what was asked, and after how many bytes each answer breaks off."""

    def do_HEAD(self) -> None:
        """How large a file is."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """A file, or the part that Range names."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        server: Server = self.server
        path = server.folder / self.path.lstrip("/")
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            self.send_error(404)
            return
        content, part = path.read_bytes(), self.headers.get("Range", "")
        server.asked.append((self.command, self.path, part))
        if part and server.knows_parts:
            first, _, last = part.removeprefix("bytes=").partition("-")
            self.send_response(206)
            content = content[int(first) : int(last) + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "text/html" if path.suffix == ".html" else "application/octet-stream")
        self.end_headers()
        if with_body:
            self.wfile.write(content[: server.breaks_after])

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


class Server(http.server.ThreadingHTTPServer):
    """Serves `folder`."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.asked = folder, list[tuple[str, str, str]]()
        self.knows_parts, self.breaks_after = True, None
        super().__init__((host, 0), Parts)

    @property
    def address(self) -> str:
        """http://HOST:PORT"""
        return f"http://{self.server_address[0]!s}:{self.server_port}"


@contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    """The server, until the end of the block."""
    server = Server(folder, host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
