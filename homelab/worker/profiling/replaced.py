"""Methods of objects that are replaced for a while, on the object itself: its class, and all other objects, stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """What was replaced, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def method(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """From now on `owner.name(...)` calls `around(original, ...)`."""
        original = getattr(owner, name)
        had_own = name in vars(owner)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._undo.append((owner, name, had_own, original))
        setattr(owner, name, call)

    def put_back(self) -> None:
        """All are as they were."""
        while self._undo:
            owner, name, had_own, original = self._undo.pop()
            if had_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
