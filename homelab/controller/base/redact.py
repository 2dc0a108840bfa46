"""Secrets are never shown: what looks like one is replaced before facts are printed for a bug report."""

from __future__ import annotations

import re
from typing import Any

from homelab.controller.base import secrets
from homelab.shared.protocol.secrecy import HIDDEN

_KEYS = re.compile(r"token|secret|passw|passphrase|_pass$|credential|cookie|(api|private|account)_?key|authorization", re.IGNORECASE)
# "the tokenizer is there" and counts of tokens are no secrets.
_HARMLESS_KEYS = re.compile(
    r"tokeniz|tokens(_|$)|token_(there|ids?|index|type)|vocab|(bos|eos|pad|unk|sep|cls|mask|image)_token", re.IGNORECASE
)
_VALUES = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{8,}                         # Hugging Face
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}          # OpenAI and others
    | \bgh[pousr]_[A-Za-z0-9]{16,}               # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{16,}
    | \bglpat-[A-Za-z0-9_-]{16,}                 # GitLab
    | \bAKIA[0-9A-Z]{16}\b                       # AWS
    | \bAIza[A-Za-z0-9_-]{30,}                   # Google
    | \bnvapi-[A-Za-z0-9_-]{16,}                 # NVIDIA
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}            # Slack
    | \bnpm_[A-Za-z0-9]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+   # a JSON web token
    | -----BEGIN[ A-Z]*PRIVATE[ ]KEY-----.*?(?:-----END[ A-Z]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
# password=..., --api-key ..., "token": ..., Authorization: Bearer ...: the name stays, the value goes. A word alone that may be harmless
# ("pass", "auth") counts as an option or before "=".
_NAMED = re.compile(
    r"""(?ix)
    ( (?:token|secret|passw(?:or)?d|passphrase|(?:api|access|private|account)[_-]?key|cookie) (?: ["']?\s*[=:]\s* | \s+ )
    | (?:pass|pwd|auth) \s*=\s* | --(?:pass|pwd|auth) \s+
    | \b(?:bearer|basic|wandb[ ]login) \s+ | \b(?:sshpass|mysql\w*)[ ][^|;&\n]{0,200}?-p\s*
    )
    ( "[^"]*" | '[^']*' | [^\s,;&"']+ )
    """
)
# curl -u user:password
_LOGIN = re.compile(r"((?:^|\s)(?:-u|--user)[ =]?[^\s:]{0,200}:)\S+")
# user:password@ in an address, or a token alone
_IN_ADDRESS = re.compile(r"(?<=://)(?:([^/\s:@]{0,200}):\S{1,500}@(?=[\w.\[])|[^/\s:@]{20,500}@)")


def text(value: str) -> str:
    """The same text without what looks like a secret."""
    value = _VALUES.sub(HIDDEN, secrets.hide(value))
    value = _IN_ADDRESS.sub(lambda match: f"{match[1]}:{HIDDEN}@" if match[1] is not None else f"{HIDDEN}@", value)
    value = _LOGIN.sub(rf"\1{HIDDEN}", value)
    return _NAMED.sub(rf"\1{HIDDEN}", value)


def tree(value: Any, key: str = "") -> Any:
    """The same JSON value: texts without secrets, and nothing at all of a key that names one."""
    if isinstance(value, dict):
        return {name: tree(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tree(inner, key) for inner in value]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    if _KEYS.search(key) and not _HARMLESS_KEYS.search(key):
        return HIDDEN
    return text(value) if isinstance(value, str) else value
