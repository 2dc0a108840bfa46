"""The advice of a node: homelab quotes it, and does not give it. Pure."""

from __future__ import annotations

from homelab.controller.base.hint import Hint
from homelab.controller.base.sanitize import plain_lines

_MOST_CHARACTERS = 1000


def advice(node: str, said: object) -> Hint:
    """The fix that a node names, as the words of this node; empty where it names none. Its lines are one: none of them begins like ours."""
    words = " ".join(plain_lines(said[: 2 * _MOST_CHARACTERS]).split())[:_MOST_CHARACTERS] if isinstance(said, str) else ""
    return Hint("node {} says: {}", node, Hint.said(words)) if words else Hint("")
