"""What happened to a run, written down on two machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import event_of

pytestmark = pytest.mark.timeout(10)


def test_what_another_machine_wrote_down_is_added_once_and_stands_in_its_place(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    store.append_lines(paths.events_jsonl, [{"time": 1.5, "what": "launched"}, {"time": 9.0, "what": "done"}])
    elsewhere = [{"time": 1.5, "what": "launched"}, {"time": 4.0, "what": "trouble: a rank is gone"}, {"time": 6.0, "what": "attempt 2 goes on"}]
    for _ in range(3):
        store.add_events(paths, elsewhere)
    assert [event["what"] for event in store.events(paths)] == ["launched", "trouble: a rank is gone", "attempt 2 goes on", "done"]
    assert len(paths.events_jsonl.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "line", [{}, {"what": "x"}, {"time": "soon", "what": "x"}, {"time": float("nan"), "what": "x"}, {"time": 1.0, "what": ["x"]}, {"time": 1.0, "what": "x", "nodes": 7}]
)
def test_half_a_line_from_a_node_is_left_out(line: dict[str, object]) -> None:
    assert event_of(line) is None


def test_what_a_node_says_is_made_harmless() -> None:
    assert event_of({"time": 1, "what": "\x1b[2Jtrouble\n", "because": "a\rb", "own": "x"}) == {"time": 1.0, "what": "trouble", "because": "b"}
