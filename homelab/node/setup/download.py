"""Fetches a file of an environment or a model from an address that this node reaches: a package index, or another node of the LAN."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from homelab.node.setup import model_folder, pieces
from homelab.shared.protocol.errors import Refusal

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from homelab.shared.protocol.setup_messages import FetchRequest, SetupReceived

_SILENT_S = 20.0  # until a connection is there, and between two blocks of bytes
_HINT = "homelab setup"


def download(request: FetchRequest) -> SetupReceived:
    """The next bytes of a file, as `pieces.receive` and `model_folder.receive`.

    Raises Refusal (kind "silent") where the server cannot be reached, or sends no parts of files.
    """
    url, first = request.url, request.offset
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not an address on a network: {url!r}")
    last = min(first + request.most, request.size) - 1
    question = urllib.request.Request(url, headers={"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(request.proxies or None))
    try:
        with opener.open(question, timeout=_SILENT_S) as response:
            if response.status != 206 and (first, last + 1) != (0, request.size):
                raise Refusal("the server does not send parts of files", where=url, hint=_HINT, kind="silent")
            into = model_folder.receive if request.model else pieces.receive
            return into(request, _Body(response, url))  # type: ignore[arg-type]
    except urllib.error.URLError as error:
        raise Refusal(
            f"it cannot be fetched: {getattr(error.reason, 'strerror', None) or error.reason}", where=url, hint=_HINT, kind="silent"
        ) from None
    except TimeoutError:
        raise Refusal(f"no answer within {_SILENT_S:.0f} s", where=url, hint=_HINT, kind="silent") from None


class _Body:
    """The bytes of a response. An error of the network is not one of the disk that they are written to."""

    def __init__(self, response: BinaryIO | Any, url: str) -> None:
        self._response, self._url = response, url

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end. Raises Refusal (kind "silent")."""
        try:
            return bytes(self._response.read(size))
        except (OSError, http.client.HTTPException) as error:
            raise Refusal(f"the download broke off: {error}", where=self._url, hint=_HINT, kind="silent") from None
