"""The shape of the house: each limit is one test, and `scripts/test` prints what is reached."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import limits


@pytest.mark.parametrize("limit", limits.LIMITS, ids=lambda limit: limit.__name__)
def test_the_house_keeps_its_limits(limit: Callable[[], list[limits.Breach]]) -> None:
    assert not limit(), "\n".join(map(str, limit()))


def test_every_room_has_its_place_in_the_order() -> None:
    assert {limits.room_of(path) for path in limits.trees()} - {"__init__"} <= {
        *limits.PROGRAMS,
        "controller",
        *(f"controller/{room}" for room in limits.ROOMS),
    }


def test_shared_names_are_shared() -> None:
    stems = [path.stem for path in limits.trees()]
    assert [name for name in limits.SHARED_NAMES if stems.count(name) < 2] == []


SAMPLE = """
from typing import Any
from homelab.cli.common import print_json
from homelab.controller.run.store import give

class Twin: ...

def wide(a, b, c, d, e, f, g, h): ...

def _short(): ...

def give() -> dict[str, Any]:
    _short()
{body}
"""


def test_the_limits_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "\n".join("    x = 1" for _ in range(400))
    tree = ast.parse(SAMPLE.format(body=body))
    places = ("controller/planning/sample.py", "controller/run/store.py", "controller/run/sample.py", "cli/common.py")
    trees = {limits.ROOT / place: tree for place in places}
    trees[limits.ROOT / "controller/run/back.py"] = ast.parse("from homelab.controller.run import sample")
    trees[limits.ROOT / "controller/run/sample.py"] = ast.parse(SAMPLE.format(body=body) + "from homelab.controller.run import back")
    monkeypatch.setattr(limits, "trees", lambda: trees)
    monkeypatch.setattr(limits, "READS_JSON", ())
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: "\n" * 400)
    for name in ("MOST_FIRST_LEVEL", "MOST_SHARED_CLASS_NAMES", "MOST_SMALL_MODULES", "MOST_SMALL_FUNCTIONS"):
        monkeypatch.setattr(limits, name, 0)
    monkeypatch.setattr(limits, "SMALL_MODULE_LINES", 1000)
    monkeypatch.setattr(limits, "TESTS_OF_THEIR_OWN", {})
    limits.file_arrows.cache_clear()
    expected = {
        limits.too_many_parameters: "wide has 8 parameters",
        limits.too_long_functions: "give has 402 lines",
        limits.too_long_modules: "400 lines",
        limits.names_with_two_meanings: "one name",
        limits.against_the_arrows: "controller/planning imports cli/common.py",
        limits.too_many_at_first_sight: f"{len(limits.first_level())} folders",
        limits.circles: "sample.py imports back.py imports sample.py",
        limits.untyped_between_rooms: "give gives or takes dict[str, Any], used by cli/common.py, controller/planning/sample.py",
        limits.too_many_shared_class_names: "Twin",
        limits.too_many_small_modules: "only controller/run/sample.py imports it",
        limits.too_many_small_functions: "_short",
        limits.unmirrored_tests: "there is no homelab/worker/cards",
    }
    try:
        for limit, words in expected.items():
            assert words in [breach.what for breach in limit()], f"{limit.__name__}: {limit()}"
    finally:
        limits.file_arrows.cache_clear()
