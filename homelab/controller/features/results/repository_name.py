"""The name of a repository of the hub. Pure."""

from __future__ import annotations

import re

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab

# huggingface_hub/utils/_validators.py (2.4): at most 96 characters, and none of the rest.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST = 96


def checked(repository: str) -> str:
    """The name itself. Raises InputError for what cannot be NAME/MODEL."""
    if (
        not _NAME.fullmatch(repository)
        or len(repository) > _MOST
        or "--" in repository
        or ".." in repository
        or repository.endswith((".git", ".", "-"))
    ):
        hint = Hint("your name on the hub, a slash, and the model's name: {}", homelab("push", "me/llama7b-support"))
        raise InputError(f"{repository!r} is no repository of the hub", where="the argument REPO", hint=hint)
    return repository
