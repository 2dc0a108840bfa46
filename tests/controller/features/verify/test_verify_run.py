"""The sequence of `homelab verify`, over nodes that answer with their real verbs: what is read, what is refused, and when a window is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.results import fetch
from homelab.controller.features.status import monitor
from homelab.controller.features.verify import verify_run, verify_table, window_run
from homelab.controller.features.verify.step_record import StepRecord, Window
from homelab.controller.features.verify.verification import Verification
from homelab.controller.features.verify.verify_run import VerifyRequest
from homelab.controller.features.verify.window_verdict import WindowCompared, WindowMachines
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import chain, checkpoint_copies, manifest, window
from tests import builders
from tests.controller.features.verify.test_step_record import Lines, chained, written
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
RUN = "2026-01-01-0000-x"


class Ground:
    """The nodes tower and laptop, and a run whose final/ is on tower; both keep its checkpoints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet, self.paths, self.folder = FakeFleet(folder), RunPaths(folder / "here" / RUN), folder
        for name in ("tower", "laptop"):
            (folder / name / "runs" / RUN / "checkpoints").mkdir(parents=True)
        plan = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in ("tower", "laptop")], precision="fp32")
        self.described = described = SimpleNamespace(run_json={"recipe_hash": "r1"}, recipe=builders.recipe())
        for module in (fetch, verify_run):
            monkeypatch.setattr(module.run_folder, "description_of", lambda paths: described)
            monkeypatch.setattr(module.run_folder, "plan_of", lambda paths, attempt=None: plan)
        self.computed: list[str] = []
        self.apart = 0.0
        self.lines: Lines = []
        monkeypatch.setattr(window_run, "run_window", self._computed)

    def _computed(self, request: Any, record: StepRecord, part: Window, points: Any) -> Any:
        self.computed.append(f"{part} on {','.join(request.names)} from {','.join(f'{point.step}@{point.holders[0]}' for point in points)}")
        if self.computed[-1].startswith("8"):
            raise HomelabError("tower has too little memory", where="tower", hint="another node")
        weights = {"node": "tower", "apart": self.apart, "way": 1.0, "most": 0.0}
        machines = WindowMachines(run="v", nodes=tuple(request.names), strategy="ddp", precision="fp32")
        return StepRecord("\n".join(map(json.dumps, self.lines))), WindowCompared.model_validate({"weights": weights}), machines

    def put(self, *, card: str | None = None, keep: tuple[int, ...] = (4, 8, 12), nodes: tuple[str, ...] = ("tower", "laptop")) -> None:
        """Write a run that kept these steps, with its model card."""
        lines = written()
        for step in keep:
            for name in nodes:
                place = Path(manifest.folder_of(self.folder / name / "runs" / RUN, step))
                place.mkdir()
                files = {"trainable.safetensors": {"sha256": f"{step:064x}", "bytes": 1}}
                (place / manifest.MANIFEST).write_text(json.dumps({"schema": 1, "step": step, "files": files, "recipe_hash": "r1"}))
        state = {step: checkpoint_copies.state_digest({"trainable.safetensors": f"{step:064x}"}) for step in (4, 8, 12)}
        self.lines = chained([{**line, "sha256": state[line["step"]]} if line["kind"] == "kept" else line for line in lines])
        final = self.folder / "tower" / "runs" / RUN / "final"
        final.mkdir()
        (final / chain.RECORD).write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        (final / "README.md").write_text(f"# x\n\n{chain.card_line(chain.end_of(self.lines) if card is None else card)}\n")

    def verify(self, steps: str = "", count: int = 3, names: tuple[str, ...] = ()) -> Verification:
        request = VerifyRequest(self.folder / "cluster.toml", steps, count, names, None, ())
        return verify_run.verify(self.fleet, self.paths, request, lambda text: None)


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def test_windows_are_computed_on_the_nodes_that_a_person_names_and_the_page_and_table_say_it(ground: Ground) -> None:
    ground.put()
    found = ground.verify("0..8", names=("laptop",))
    assert ground.computed == ["0..8 on laptop from 8@tower"] and found.verdict == "agrees"
    assert found.answer == f"{RUN} agrees within fp32 rounding: steps 0..8"
    page = verify_table.page(found, 1e9, 0, "1.0")
    assert "0..8" in page and found.chain in page and "proven" not in page and "<script" not in page
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(verify_table.table(found))
    assert max(map(len, console.export_text().splitlines())) <= 80


def test_the_recipe_of_the_run_tells_what_may_differ(ground: Ground) -> None:
    ground.put()
    ground.apart = 0.5
    assert ground.verify("0..8").verdict == "differs"
    ground.described.recipe = builders.recipe(parallel={"compress": "bf16"})
    found = ground.verify("0..8")
    assert found.verdict == "unclear" and 'compress = "bf16" may do so' in found.answer


def test_what_cannot_be_computed_later_is_a_row_and_at_once_an_error(ground: Ground) -> None:
    ground.put()
    found = ground.verify()
    assert [one.verdict for one in found.windows] == ["agrees", "agrees", "not computed"] and found.verdict == "not computed"
    assert "were not computed again: tower has too little memory" in found.answer
    assert any(note.startswith("the end of the chain chose 3 of 3 windows") for note in found.notes)
    with pytest.raises(HomelabError, match="too little memory"):
        ground.verify("8..12")


def test_a_checkpoint_that_is_gone_or_another_one_is_told_without_computing(ground: Ground) -> None:
    ground.put(keep=(8, 12), nodes=("laptop",))
    gone = ground.verify("4..8")
    assert gone.windows[0].verdict == "not computed" and "no node that answers has the checkpoint of step 4" in gone.answer
    other = Path(manifest.folder_of(ground.folder / "laptop" / "runs" / RUN, 8)) / manifest.MANIFEST
    other.write_text(other.read_text().replace(f"{8:064x}", "f" * 64))
    found = ground.verify("0..8")
    assert (
        found.verdict == "differs" and found.windows[0].because == "the checkpoint of step 8 on laptop is another one than the record names"
    )
    assert ground.computed == []
    ground.fleet.nodes["tower"].is_off = True
    shutil.copytree(ground.folder / "tower/runs" / RUN / "final", ground.folder / "laptop/runs" / RUN / "final")
    assert ground.verify("0..8").verdict == "not computed", "tower may have the one that the record names"


def test_the_window_is_told_which_checkpoints_the_record_names(ground: Ground) -> None:
    ground.put()
    record = StepRecord("\n".join(map(json.dumps, ground.lines)))
    for part, steps in ((Window(begin=4, end=8), (4, 8)), (Window(begin=0, end=8), (8,))):
        asked = window_run._described({"name": RUN}, builders.plan(), ground.paths, record, part)[window.REQUEST]
        assert asked["kept"] == {str(step): record.kept[step] for step in steps}


@pytest.mark.parametrize("steps", ["3..8", "8..4", "4", "a..b", "4..", "0..16", "..", "-4..8", "4..8" * 20])
def test_steps_that_were_not_kept_are_refused_with_those_that_were(ground: Ground, steps: str) -> None:
    ground.put()
    with pytest.raises(InputError) as caught:
        ground.verify(steps)
    assert "0, 4, 8, 12" in str(caught.value.hint) and ground.computed == []


def test_an_edited_record_is_named_and_nothing_is_computed(ground: Ground) -> None:
    ground.put(card="f" * 32)
    found = ground.verify()
    assert found.verdict == "differs" and found.windows == () and ground.computed == []
    assert found.answer.startswith(f"{RUN}: the record ends after step 12 with the chain") and "ffffffffffff" in found.answer


def test_a_run_that_is_not_over_has_the_record_of_its_newest_checkpoint(ground: Ground) -> None:
    ground.put()
    for name in ("tower", "laptop"):
        folder = ground.folder / name / "runs" / RUN
        (folder / "final" / chain.RECORD).rename(folder / "checkpoints/step-00000012" / chain.RECORD) if name == "tower" else None
        shutil.rmtree(folder / "final", ignore_errors=True)
    found = ground.verify("0..4")
    assert found.verdict == "agrees" and found.card_end == "" and found.node == "tower"
    assert any("there is no model card yet" in note for note in found.notes)


def test_a_run_without_a_record_and_one_of_an_older_version_say_so(ground: Ground) -> None:
    with pytest.raises(HomelabError, match="this run has no record"):
        ground.verify()
    ground.put()
    record = ground.folder / "tower" / "runs" / RUN / "final" / chain.RECORD
    record.write_text(
        "".join(json.dumps({key: value for key, value in line.items() if key != "chain"}) + "\n" for line in ground.lines[1:])
    )
    with pytest.raises(HomelabError, match="has no chain: an older homelab has begun it"):
        ground.verify()


def test_a_window_that_nobody_sees_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The network of this machine is gone, and stays so."""
    clock = [0.0]

    class Blind:
        def __init__(self, *_: Any) -> None:
            pass

        def look(self) -> Any:
            raise HomelabError("no node answers", where="tower", hint="look at the switch")

    monkeypatch.setattr(monitor, "Watcher", Blind)
    monkeypatch.setattr(
        window_run, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    )
    said: list[str] = []
    with pytest.raises(HomelabError) as error:
        window_run._wait(FakeFleet(tmp_path), RunPaths(tmp_path / "verify-4-8"), said.append, Window(begin=4, end=8))
    assert "nothing of it was seen for 5 minutes: no node answers" in error.value.message and "homelab status verify-4-8" in str(
        error.value.hint
    )
    assert 290 < clock[0] < 310 and said
