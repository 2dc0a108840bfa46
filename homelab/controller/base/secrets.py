"""Secrets that this process knows by value: wherever they turn up in words that leave it, they are hidden. Pure, but for what is known.

A program on a node may print its token, or raise it ("401 for token ..."). Its words come here, and would be kept in files and shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from homelab.shared.protocol import secrecy
from homelab.shared.protocol.secrecy import HIDDEN

# Also behind other letters: PGPASSWORD, HFTOKEN.
_NAMES = re.compile(
    r"(?:TOKENS?|SECRETS?|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|PRIVATE|WANDB)_?KEY|_PWD|_PAT)(?=_|$)", re.IGNORECASE
)
# The login in an address, http://user:password@proxy. A password may hold "/" and "@"; a number before "/" is a port.
_LOGIN = re.compile(r"(?<=://)(?:[^/?#\s]+(?=@)|[^/?#\s:]+:(?!\d+[/?#])\S+(?=@))")
_known: list[str] = []


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret; HF_TOKEN_PATH only says where one is."""
    return bool(_NAMES.search(name)) and not name.upper().endswith(("_PATH", "_FILE", "_DIR"))


def without_login(value: str) -> str:
    """The same with `***` for a user and password in an address."""
    return _LOGIN.sub(HIDDEN, value)


def know(environment: Mapping[str, str]) -> None:
    """Hide from now on the values of these variables whose names say that they are secret (HF_TOKEN, WANDB_API_KEY ...), and no others."""
    _known[:] = secrecy.searched(value for name, value in environment.items() if _NAMES.search(name))


def are_known() -> bool:
    """Whether there is anything to hide."""
    return bool(_known)


def hide(text: str) -> str:
    """The same text with `***` for every secret that is known."""
    return secrecy.hide(text, _known)


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of secrets hidden, for anything that is shown or kept."""
    return {key: HIDDEN if names_a_secret(key) else without_login(value) for key, value in environment.items()}
