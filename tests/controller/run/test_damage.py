"""Files of a run that are damaged on the controller: what cannot be is left out, and one folder stands in nobody else's way."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.features.status import run_index
from homelab.controller.run import event_log, run_folder, run_lookup, store
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(20)

NESTED = 200_000 * "["
PLAN = {
    "run": "r", "attempt": 1, "world_size": 1, "backend": "gloo", "device": "cpu", "precision": "fp32", "strategy": "ddp", "head": "a",
    "master_address": "10.0.0.1", "master_port": 29500, "resume_step": 0, "ranks": [], "nodes": [],
}  # fmt: skip


class Fleet:
    """Nodes that know of no run, or of these."""

    def __init__(self, *runs: dict[str, Any]) -> None:
        self._runs = list(runs)

    def ask(self, verb: str, *_: Any, **__: Any) -> Any:
        assert verb == "runs"
        return {"a": {"runs": self._runs}}, {}


def said(text: str) -> None:
    """Progress that nobody wants."""


@pytest.mark.parametrize("moment", ["1e400", "1e18", "-1e18", "1" + 400 * "0", "NaN", "true", '"soon"'])
def test_an_event_at_no_time_that_can_be_is_left_out(tmp_path: Path, moment: str) -> None:
    paths = RunPaths(tmp_path)
    paths.events_jsonl.write_text(f'{{"time": 5, "what": "launched"}}\n{{"time": {moment}, "what": "x"}}\n{NESTED}\n')
    assert [line["what"] for line in event_log.lines(paths)] == ["launched"]


def test_an_event_that_is_nested_is_shown_without_its_depth() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    assert (
        event_row({"time": 5, "what": "launched", "nodes": ["a", deep], "odd": deep, "recipe": "r.toml"}).text
        == "launched: nodes a · recipe r.toml"
    )


@pytest.mark.parametrize("moment", ["1e300", "1" + 400 * "0", "NaN", "-5", "[]"])
def test_a_run_that_was_made_at_no_time_that_can_be_is_listed(tmp_path: Path, moment: str) -> None:
    paths = RunPaths(tmp_path / "r")
    paths.root.mkdir()
    paths.run_json.write_text(f'{{"created_at": {moment}}}')
    rows = run_index.all_runs(Fleet(), tmp_path, said).rows  # type: ignore[arg-type]
    assert [(row.name, row.created_at) for row in rows] == [("r", None)]


@pytest.mark.parametrize("content", [NESTED, '{"state": "\\u001b]0;owned\\u0007", "attempt": "x"}', "5"])
def test_a_state_that_cannot_be_is_not_shown(tmp_path: Path, content: str) -> None:
    paths = RunPaths(tmp_path / "r")
    paths.root.mkdir()
    paths.run_json.write_text("{}")
    paths.state_json.write_text(content)
    rows = run_index.all_runs(Fleet(), tmp_path, said).rows  # type: ignore[arg-type]
    assert [(row.state, row.attempt) for row in rows] == [("lost", 0)], "no node has it"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    os.mkfifo(paths.state_json)
    os.mkfifo(paths.events_jsonl)
    paths.run_json.symlink_to("/dev/zero")
    assert store.read_json(paths.state_json) is None and event_log.lines(paths) == [] and store.read_object(paths.run_json) == {}


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07\x1b[2Jevil", "a/b", "", "a\nfix: b", 65 * "a"])
def test_a_plan_with_a_node_that_none_can_be_called_is_none(tmp_path: Path, name: str) -> None:
    paths = RunPaths(tmp_path / "r")
    paths.attempt(1).mkdir(parents=True)
    paths.plan_json(1).write_text(json.dumps(PLAN))
    assert run_folder.plan_of(paths).head == "a"
    paths.plan_json(1).write_text(json.dumps(PLAN | {"head": name}))
    with pytest.raises(HomelabError, match="it has no readable plan"):
        run_folder.plan_of(paths)


def test_a_name_that_is_no_name_is_said_in_one_line(tmp_path: Path) -> None:
    for name in (5000 * "x", "x\nfix: y", "x\x1b]0;owned\x07"):
        with pytest.raises(InputError) as caught:
            run_lookup.run(Fleet(), tmp_path, name, said)  # type: ignore[arg-type]
        assert caught.value.message.startswith('no run is called "x') and len(caught.value.message) < 200
        assert caught.value.message.isprintable() or "…" in caught.value.message


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A folder that every user may look into; nobody's rights for the test, where it runs as root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "open").mkdir()
    (folder / "open" / "run.json").write_text("{}")
    (folder / "closed").mkdir()
    (folder / "closed" / "run.json").write_text("{}")
    (folder / "closed").chmod(0o000)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(was)
    (folder / "closed").chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_of_another_user_hides_no_other_run(anybody: Path) -> None:
    assert [paths.name for paths in store.runs_in(anybody)] == ["open"]
    with pytest.raises(HomelabError, match="cannot be read: permission denied") as caught:
        run_lookup.run(Fleet(), anybody, "closed", said)  # type: ignore[arg-type]
    assert str(anybody / "closed") in caught.value.where and caught.value.hint.startswith("sudo chown -R ")
    with pytest.raises(HomelabError, match="cannot be listed") as caught:
        store.runs_in(anybody / "closed")
    assert caught.value.hint.startswith("sudo chown -R ")
