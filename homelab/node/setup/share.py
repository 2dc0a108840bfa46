"""Serves files of an environment or a model to other nodes of the LAN while one command of the controller waits for it."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import secrets
import sys
import threading
from typing import TYPE_CHECKING

from homelab.node.setup import model_folder, pieces
from homelab.shared.protocol import message
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.setup_messages import SetupShared

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.setup_messages import ShareRequest

_PART = re.compile(r"bytes=(\d+)-(\d+)")
_LIMIT_S = 4 * 3600.0
_BLOCK_BYTES = 1 << 20


def share(request: ShareRequest) -> None:
    """Serve until stdin ends. First line out: {"address", "port", "token"}; a file is at http://ADDRESS:PORT/TOKEN/SHA256.

    Who knows no token gets nothing; who gets a file compares its sha256. Raises Refusal where nothing can be served.
    """
    address = request.address or (os.environ.get("SSH_CONNECTION", "").split() + ["", "", ""])[2]
    if not address:  # an empty one would mean all of them
        raise Refusal(
            "this node does not know its address on the LAN", where="lan_address in cluster.toml", hint="homelab setup", kind="silent"
        )
    token = secrets.token_hex(16)
    places = {f"/{token}/{sha256}": _place(entry) for sha256, entry in request.files.items()}
    try:
        server = _Server((address, 0), places)
    except OSError as error:
        raise Refusal(
            f"no other node can copy from here: {error.strerror or error}", where=address, hint="homelab setup", kind="silent"
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    end = threading.Timer(_LIMIT_S, os._exit, (0,))  # the controller lost its power
    end.daemon = True
    end.start()
    print(json.dumps(message.fields(SetupShared(address=address, port=server.server_port, token=token))), flush=True)
    sys.stdin.read()


def _place(entry: JsonObject) -> str:
    if "model" in entry:
        return os.path.join(model_folder.place(entry["model"], entry["commit"]), model_folder.checked_name(entry["name"]))
    return pieces.place(entry["name"])


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], places: dict[str, str]) -> None:
        self.places = places
        super().__init__(address, _Parts)


class _Parts(http.server.BaseHTTPRequestHandler):
    timeout = 60

    def do_GET(self) -> None:
        """The part of a file that Range names."""
        part = _PART.fullmatch(self.headers.get("Range", ""))
        path = self.server.places.get(self.path)  # type: ignore[attr-defined]
        if part is None or path is None:
            self.send_error(404)
            return
        try:
            with open(path, "rb") as file:
                first = int(part[1])
                left = max(0, min(int(part[2]) + 1, os.fstat(file.fileno()).st_size) - first)
                file.seek(first)
                self.send_response(206)
                self.send_header("Content-Length", str(left))
                self.end_headers()
                while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                    self.wfile.write(block)
                    left -= len(block)
        except OSError:  # the other node is gone, or the file: it asks again, or asks the controller
            with contextlib.suppress(OSError):
                self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: stdout and stderr belong to the controller's question."""
