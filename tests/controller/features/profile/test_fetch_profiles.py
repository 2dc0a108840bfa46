"""Profiles come from the nodes, once; what is missing is said, and what a node has made up is refused."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.cli import profile as command
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.profile import fetch_profiles, over_ranks, profile_tables
from homelab.controller.features.profile.fetch_profiles import Profiles
from homelab.controller.features.profile.rank_profile import RankProfile
from homelab.controller.features.results import fetch
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import profile_files
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)

RUN = "2026-01-01-0000-x"
ASKED = {"first_step": 8, "last_step": 9, "ranks": [0, 1]}


def summary(rank: int, **changes: Any) -> dict[str, Any]:
    operators = [
        {"name": "aten::sort", "calls": 4, "self_s": 3.0, "device_s": 0.0, "share": 0.75,
         "places": [{"module": "model.layers.1.mlp", "class": "LlamaMLP", "source": "m.py:7", "share": 0.9}]},
        {"name": "aten::mm", "calls": 40, "self_s": 0.5, "device_s": 0.0, "share": 0.125, "places": []},
    ]  # fmt: skip
    exchanges = [
        {"name": "bucket 0", "kind": "all-reduce", "calls": 2, "payload_bytes": 8_000_000, "sent_bytes": 8_000_000, "seconds": 2.0, "overlap_s": 0.5},
    ]  # fmt: skip
    return {
        "schema": 1, "run": RUN, "attempt": 1, "rank": rank, "node": "tower", "device": "cpu", "strategy": "ddp", "world_size": 2, "torch": "2.13",
        "steps": [8, 9], "step_s": [2.0, 2.0], "times": [[1.0, 3.0], [3.0, 5.0]], "usual_step_s": 1.6, "phases": {"forward": 3.5, "backward": 0.5},
        "operators": operators, "exchanges": exchanges,
        "memory": {"points": [[0.0, 100 << 20], [2.0, 200 << 20], [4.0, 120 << 20]], "peak_bytes": 200 << 20, "peak_s": 2.0, "peak_phase": "forward"},
    } | changes  # fmt: skip


def put(folder: Path, rank: int, content: Any) -> None:
    place = folder / "runs" / RUN / "profiles" / f"rank-{rank}"
    place.mkdir(parents=True)
    (place / "profile.json").write_text(json.dumps(content))
    (place / "rank.pt.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))


class Ground:
    """The nodes tower and laptop, and a run that was launched on both with `run_json`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet, self.paths, self.folder = FakeFleet(folder), RunPaths(folder / "here" / RUN), folder
        self.run_json: dict[str, Any] = {"profile": ASKED, "recipe_file": "chats.toml"}
        self.recipe = SimpleNamespace(model=object(), script=None)
        for name in ("tower", "laptop"):
            (folder / name).mkdir()
        plan = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in ("tower", "laptop")], ranks=[])
        for module in (fetch, fetch_profiles):
            monkeypatch.setattr(
                module.run_folder, "description_of", lambda paths: SimpleNamespace(run_json=self.run_json, recipe=self.recipe)
            )
            monkeypatch.setattr(module.run_folder, "plan_of", lambda paths, attempt=None: plan)
        monkeypatch.setattr(fetch_profiles, "MetricsSource", lambda fleet, paths: SimpleNamespace(look=lambda: None))

    def bring(self) -> Profiles:
        return fetch_profiles.bring(self.fleet, self.paths, lambda text: None)


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def test_both_ranks_come_once(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    put(ground.folder / "tower", 0, summary(0))
    put(ground.folder / "laptop", 1, summary(1, node="laptop"))
    found = ground.bring()
    assert [one.rank for one in found.ranks] == [0, 1] and found.missing == ()
    assert all(gzip.decompress(trace.read_bytes()) == b'{"traceEvents": []}' for trace in found.traces)
    before = {path: path.stat().st_mtime_ns for path in ground.paths.root.rglob("*")}
    ground.bring()
    assert before == {path: path.stat().st_mtime_ns for path in ground.paths.root.rglob("*")}
    command._print(found)
    shown = capsys.readouterr().out
    assert "steps 8 to 9 on rank 0, 1, ddp, each 1.25 times as long" in shown
    assert "aten::sort" in shown and "model.layers.1.mlp" in shown and "75.0%" in shown and "25%" in shown


def test_what_is_missing_is_said(ground: Ground) -> None:
    put(ground.folder / "tower", 0, summary(0))
    note = {"kind": "note", "attempt": 1, "rank": 1, "message": "no profile of rank 1, the training continues: No space left on device"}
    ground.paths.root.mkdir(parents=True)
    ground.paths.metrics_jsonl.write_text(json.dumps(note) + "\n")
    assert ground.bring().missing == (note["message"], "there is no profile of rank 1")


def test_nothing_there(ground: Ground) -> None:
    with pytest.raises(HomelabError, match="steps 8 to 9 is not made yet") as caught:
        ground.bring()
    assert f"homelab status {RUN}" in caught.value.hint
    ground.run_json.pop("profile")
    with pytest.raises(HomelabError, match="no step of this run was profiled") as caught:
        ground.bring()
    assert "homelab launch chats.toml --profile 3" in caught.value.hint
    ground.recipe.script = object()
    with pytest.raises(InputError, match="built-in worker"):
        ground.bring()


@pytest.mark.parametrize("content", [{}, [], summary(0, steps=[]), summary(0, step_s=[float("inf")]), summary(0, operators="x")])
def test_a_profile_that_is_none(ground: Ground, content: Any) -> None:
    put(ground.folder / "tower", 0, content)
    with pytest.raises(HomelabError, match="this profile cannot be read") as caught:
        ground.bring()
    assert str(ground.paths.profiles / "rank-0") in caught.value.hint and f"homelab profile {RUN}" in caught.value.hint


def test_words_of_a_node_steer_no_terminal() -> None:
    profile = RankProfile.model_validate(summary(0, node="a\x1b[2Jb"))
    assert "\x1b" not in profile.node


def test_ranks_together() -> None:
    ranks = [RankProfile.model_validate(summary(rank)) for rank in (0, 1)]
    sort, mm = over_ranks.dearest(ranks)
    assert (sort.name, sort.calls, sort.seconds, sort.share) == ("aten::sort", 8, 6.0, 0.75)
    assert sort.place == "model.layers.1.mlp (LlamaMLP, m.py:7)" and sort.place_share == pytest.approx(0.9) and mm.place_share is None
    (bucket,) = over_ranks.exchanges(ranks)
    assert (bucket.calls, bucket.sent_bytes, bucket.seconds, bucket.overlap) == (1, 4_000_000, 1.0, 0.25)
    (own, _) = over_ranks.memory(ranks, {0: 210 << 20})
    assert own.error == pytest.approx(0.05)


def test_the_chart_has_the_plan_as_a_line() -> None:
    profile = RankProfile.model_validate(summary(0))
    rows = [line.plain for line in profile_tables.memory_chart(profile, 210 << 20, 80)]
    assert len(rows) == profile_tables.HEIGHT + 2 and "the plan's peak" in rows[0] and rows[-1].endswith("4.00 s")
    assert "─" * 20 in rows[1] and "█" in rows[2] and all(len(row) <= 80 for row in rows)
    assert profile_tables.memory_chart(profile, None, 20) == []


def test_the_command_of_a_hint_is_typed_as_it_stands(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "my runs" / RUN)
    folder = paths.profiles / "rank-0"
    folder.mkdir(parents=True)
    (folder / profile_files.SUMMARY).write_text("{}")
    with pytest.raises(HomelabError, match="this profile cannot be read") as caught:
        fetch_profiles._read(paths, 0)
    subprocess.run(caught.value.hint.partition("remove it: ")[2].partition(";")[0], shell=True, check=True)
    assert not folder.exists()
