"""Whether this node could download from the hub: a token, a way to the hub. No token ever leaves this file."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit

from homelab.shared.protocol import hub_cache

CONNECT_S = 2.0
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TRUE = ("1", "ON", "YES", "TRUE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def data_cache() -> str:
    """The folder of data sets as `datasets` prepares them (its config.py)."""
    named = os.environ.get("HF_DATASETS_CACHE")
    return os.path.expanduser(named) if named else os.path.join(hub_cache.home(), "datasets")


def has_token() -> bool:
    """True where the Hugging Face libraries would find a token."""
    if any((os.environ.get(name) or "").strip() for name in _TOKENS):
        return True
    named = os.environ.get("HF_TOKEN_PATH")
    path = os.path.expanduser(named) if named else os.path.join(hub_cache.home(), "token")
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False


def way() -> str | None:
    """One of "ok", "offline" (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set here), why the hub cannot be reached, or None where a proxy makes it impossible to know.

    One TCP connection to HF_ENDPOINT or huggingface.co, given up after two seconds; nothing is sent.
    """
    if (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE:
        return "offline"
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    try:
        place = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        host, port = place.hostname, place.port or (80 if place.scheme == "http" else 443)
    except ValueError as error:
        return f"HF_ENDPOINT is not an address: {error}"
    if not host:
        return "HF_ENDPOINT is not an address"
    answers = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            answers.append("ok")
        except (OSError, UnicodeError) as error:
            answers.append(f"{host}:{port}: {getattr(error, 'strerror', None) or error}")

    # A name lookup has no time limit of its own.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(CONNECT_S + 0.2)
    return answers[0] if answers else f"{host}:{port}: no answer within {CONNECT_S:.0f} s"
