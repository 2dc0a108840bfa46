"""The order of the suite: what takes long comes first, so that no worker is left with a long file at the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

LONG = ("e2e", "cli", "worker", "lab", "remote")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: our tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of LONG first, in that order; a file stays together."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)
