"""Say: the function that tells a person what is being done now, one line of text at a time."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
