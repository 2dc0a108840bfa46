"""Twelve recorded snapshots are drawn as they were looked at."""

from __future__ import annotations

import time

import pytest

from tests.controller.dashboard import golden


@pytest.mark.parametrize("name", golden.PICTURES)
def test_the_picture_is_the_one_that_was_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        picture = golden.drawn(name)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert picture == (golden.FOLDER / f"{name}.txt").read_text(encoding="utf-8"), (
        "is it better? TZ=UTC python -m tests.controller.dashboard.golden"
    )
    assert picture.partition("in ASCII:\n")[2].isascii()
