"""Whether the process behind a mark still lives: a bare pid may be another's by now."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from homelab.controller.run import process_owner

pytestmark = pytest.mark.timeout(20)


def test_who_lives_and_who_is_dead() -> None:
    program = "import json; from homelab.controller.run import process_owner; print(json.dumps(process_owner.mark()), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    import json

    mark: dict[str, Any] = json.loads(process.stdout.readline())
    assert mark["pid"] == process.pid and process_owner.lives_here(mark) and not process_owner.is_dead(mark)
    process.stdin.close()
    process.wait()
    assert not process_owner.lives_here(mark) and process_owner.is_dead(mark)


@pytest.mark.parametrize(
    ("change", "dead"), [({}, False), ({"born": 1}, True), ({"boot_id": "another"}, False), ({"namespace": "a container's"}, False)]
)
def test_only_of_this_machine_and_this_boot_can_be_said_that_somebody_is_dead(change: dict[str, Any], dead: bool) -> None:
    assert process_owner.is_dead(process_owner.mark() | change) is dead
    assert process_owner.lives_here(process_owner.mark() | change) is (not change or "namespace" in change)


@pytest.mark.parametrize("spoilt", [{}, {"pid": "x"}, {"pid": 1, "born": None}, {"pid": [], "born": {}}])
def test_a_mark_that_is_not_whole_says_nothing(spoilt: dict[str, Any]) -> None:
    assert not process_owner.is_dead(spoilt) and not process_owner.lives_here(spoilt)


def test_how_long_this_process_has_run() -> None:
    assert 0 < process_owner.age_s() < 24 * 3600
