"""A result comes from a node: whole, resumed, damaged, invented. The nodes run the real verbs in folders of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.features.results import fetch, receive
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from tests.fakes import FakeFleet, ask_node

RUN = "2026-01-01-0000-x"
WEIGHTS = (20).to_bytes(8, "little") + b"{" + bytes(range(256)) * 8000
FINAL = {"adapter_model.safetensors": WEIGHTS, "README.md": b"card", "tokenizer.json": b"{}", "training_args.bin": b"pickle"}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    """tower has final/."""
    folder = tmp_path / "tower/runs" / RUN / "final"
    folder.mkdir(parents=True)
    for name, content in FINAL.items():
        (folder / name).write_bytes(content)
    described = SimpleNamespace(recipe=SimpleNamespace(model=object()))
    monkeypatch.setattr(run_folder, "description_of", lambda paths: described)
    monkeypatch.setattr(
        run_folder, "plan_of", lambda paths: SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in ("tower", "laptop", "gone")])
    )
    monkeypatch.setattr(receive, "_PIECE_BYTES", 500_000)
    (tmp_path / "laptop").mkdir()
    return FakeFleet(tmp_path)


def bring(fleet: FakeFleet, place: Path) -> fetch.Fetched:
    return fetch.model(fleet, RunPaths(place.parent / RUN), place, lambda text: None)


def test_everything_comes_but_what_could_run_code(fleet: FakeFleet, tmp_path: Path) -> None:
    place = tmp_path / "here/x"
    done = bring(fleet, place)
    assert (done.changed, done.node, done.files, done.left_out) == (True, "tower", 3, ("training_args.bin",))
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.name != receive.RECORD} == {
        name: FINAL[name] for name in FINAL if name != "training_args.bin"
    }
    assert [path.name for path in place.parent.iterdir()] == ["x"]
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    again = bring(fleet, place)
    assert not again.changed and again.fetched_bytes == 0 and before == {path: path.stat().st_mtime_ns for path in place.iterdir()}


def test_a_newer_model_takes_the_place_of_what_was_fetched(fleet: FakeFleet, tmp_path: Path) -> None:
    place = tmp_path / "here/x"
    bring(fleet, place)
    (tmp_path / "tower/runs" / RUN / "final/README.md").write_text("another card")
    done = bring(fleet, place)
    assert done.changed and (place / "README.md").read_text() == "another card" and [path.name for path in place.parent.iterdir()] == ["x"]


def test_files_that_somebody_has_added_stay_when_a_newer_model_comes(fleet: FakeFleet, tmp_path: Path) -> None:
    place, final = tmp_path / "here/x", tmp_path / "tower/runs" / RUN / "final"
    bring(fleet, place)
    (place / "notes").mkdir()
    (place / "notes/mine.txt").write_text("mine")
    (place / "link").symlink_to("notes")
    (place / "evaluation.json").write_text("mine, too")
    (final / "README.md").write_text("another card")
    assert bring(fleet, place).changed and (place / "README.md").read_text() == "another card"
    assert (place / "notes/mine.txt").read_text() == "mine" and (place / "link").is_symlink()
    assert (place / "evaluation.json").read_text() == "mine, too"
    (final / "evaluation.json").write_text("of the run")
    with pytest.raises(HomelabError, match=r"a file of the name evaluation\.json") as refused:
        bring(fleet, place)
    assert (place / "evaluation.json").read_text() == "mine, too" and "mv " in refused.value.hint
    (final / "evaluation.json").unlink()
    (final / "README.md").write_text("a third card")
    place.rename(place.parent / ".x.old")  # as a process leaves it that is killed between the two renames
    bring(fleet, place)
    assert (place / "notes/mine.txt").read_text() == "mine" and [path.name for path in place.parent.iterdir()] == ["x"]


@pytest.mark.parametrize("name", [".", "", "..", "../here"])
def test_the_current_folder_is_refused_before_anything_is_fetched(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="the current folder cannot be replaced") as refused:
        fetch.model(fleet, RunPaths(tmp_path / RUN), Path(name), lambda text: None)
    assert str(tmp_path) in refused.value.hint and not list((tmp_path / "here").iterdir())
    done = fetch.model(fleet, RunPaths(tmp_path / RUN), Path("model"), lambda text: None)
    assert done.folder == "model" and (tmp_path / "here/model/README.md").is_file()


def test_a_mounted_disk_is_refused(fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(InputError, match="a mounted disk cannot be replaced"):
        bring(fleet, tmp_path / "disk")


def test_a_folder_of_somebody_else_and_an_edited_file_stay(fleet: FakeFleet, tmp_path: Path) -> None:
    place = tmp_path / "here/x"
    place.mkdir(parents=True)
    (place / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        bring(fleet, place)
    (place / "mine.txt").unlink()
    bring(fleet, place)
    (place / "README.md").write_text("my words")
    with pytest.raises(HomelabError, match=r"README\.md differs from the fetched file"):
        bring(fleet, place)
    assert (place / "README.md").read_text() == "my words"


def test_what_was_cut_off_goes_on_where_it_ended(fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, pieces = tmp_path / "here/x", []
    cut_after = [3]
    real = fleet.nodes["tower"].run

    def run(command: str, **options: Any) -> Any:
        if "result-part" in command:
            if not cut_after[0]:
                raise UnreachableError("gone", where="node tower", hint="wake it")
            cut_after[0] -= 1
            pieces.append(json.loads(options["head"])["offset"])
        return real(command, **options)

    monkeypatch.setattr(fleet.nodes["tower"], "run", run)
    with pytest.raises(UnreachableError):
        bring(fleet, place)
    assert not place.exists()
    cut_after[0] = 99
    done = bring(fleet, place)
    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert done.fetched_bytes < done.total_bytes and pieces.count(0) == 3, "each file begins once"


def test_a_damaged_piece_is_refused_and_comes_again(fleet: FakeFleet, tmp_path: Path) -> None:
    place = tmp_path / "here/x"
    with receive.held(place) as partial:
        sha256 = {
            entry["name"]: entry["sha256"] for entry in fleet.agent("tower").ask("result-files", {"run": RUN, "folder": "final"})["files"]
        }
        (partial / f"{sha256['adapter_model.safetensors']}.part").write_bytes(b"x" * 1000)
        (partial / "README.md").write_bytes(b"CARD")
        (partial / "of-another.safetensors").write_bytes(b"x")
    bring(fleet, place)
    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS and (place / "README.md").read_bytes() == b"card"
    assert not (place / "of-another.safetensors").exists()


def test_a_pickle_by_another_name_is_refused(fleet: FakeFleet, tmp_path: Path) -> None:
    (tmp_path / "tower/runs" / RUN / "final/adapter_model.safetensors").write_bytes(b"\x80\x02cos\nsystem\n" * 9)
    with pytest.raises(HomelabError, match="does not begin as a safetensors file"):
        bring(fleet, tmp_path / "here/x")
    assert not (tmp_path / "here/x").exists()


def test_a_node_that_names_other_places_is_not_believed(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.answer(
        "result-files", {"path": "/x", "files": [{"name": "../evil.json", "size": 1, "sha256": "a" * 64}], "left_out": []}, ["tower"]
    )
    with pytest.raises(HomelabError, match="never sends"):
        bring(fleet, tmp_path / "here/x")


@pytest.mark.parametrize(
    "change", [{"folder": "checkpoints/step-00000001"}, {"folder": "../x"}, {"name": "../../run.json"}, {"name": "training_args.bin"}]
)
def test_a_node_sends_nothing_else(fleet: FakeFleet, change: dict[str, str]) -> None:
    request = {"run": RUN, "folder": "final", "name": "README.md", "offset": 0, "count": 10, **change}
    with pytest.raises(HomelabError):
        fleet.agent("tower").ask("result-part", request)


def test_two_fetches_to_one_place(fleet: FakeFleet, tmp_path: Path) -> None:
    with receive.held(tmp_path / "x"), pytest.raises(HomelabError, match="another process"), receive.held(tmp_path / "x"):
        pass


def test_a_script_a_run_without_a_checkpoint_and_a_node_that_is_away(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.nodes["tower"].is_off = True
    with pytest.raises(HomelabError, match="no finished model") as refused:
        bring(fleet, tmp_path / "x")
    assert "tower did not answer" in refused.value.where
    monkeypatch.setattr(run_folder, "description_of", lambda paths: SimpleNamespace(recipe=SimpleNamespace(model=None)))
    with pytest.raises(HomelabError, match="has saved nothing") as unsaved:
        bring(fleet, tmp_path / "x")
    assert "tower did not answer" in unsaved.value.where
    with pytest.raises(InputError, match=r"\[script\]"):
        fetch.merged(fleet, RunPaths(tmp_path / RUN), tmp_path / "x", lambda text: None)


KILLED = """
import sys
from pathlib import Path
from homelab.controller.features.results import fetch, receive
from homelab.controller.features.results.best_copy import ModelHolder
from homelab.controller.run.paths import RunPaths
from tests.fakes import FakeFleet
root, place = Path(sys.argv[1]), Path(sys.argv[2])
receive._PIECE_BYTES = 4096
fetch.bring(FakeFleet(root), RunPaths(root / sys.argv[3]), ModelHolder(node="tower", folder="final"), place, lambda text: None)
"""


@pytest.mark.timeout(120)
def test_killed_with_9_in_the_middle(fleet: FakeFleet, tmp_path: Path) -> None:
    place = tmp_path / "here/x"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(place), RUN],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "HOME": str(tmp_path)},
    )
    partial = place.parent / ".x.partial"
    deadline = time.monotonic() + 100
    while (
        not [path for path in partial.glob("*.part") if path.stat().st_size > 20_000]
        and child.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not place.exists()
    done = fetch.bring(fleet, RunPaths(tmp_path / RUN), ModelHolder(node="tower", folder="final"), place, lambda text: None)
    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS and done.fetched_bytes < done.total_bytes - 20_000


SAVED = {"state.json": b"{}", "checkpoint-40/model.safetensors": WEIGHTS, "checkpoint-40/trainer_state.json": b"{}", "checkpoint-40/deep/er/rng.pth": b"pickle"} | {
    "step-40.pt": b"pt"
}  # fmt: skip


@pytest.fixture
def program(fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    """laptop has what a program has saved; tower has less of it."""
    monkeypatch.setattr(run_folder, "description_of", lambda paths: SimpleNamespace(recipe=SimpleNamespace(model=None)))
    for node, names in (("laptop", SAVED), ("tower", {"state.json": b"{}"})):
        for name, content in names.items():
            path = tmp_path / node / "runs" / RUN / "saved" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return fleet


def test_what_a_program_has_saved_comes_as_it_is(program: FakeFleet, tmp_path: Path) -> None:
    saved = tmp_path / "laptop/runs" / RUN / "saved"
    (saved / ".unused-checkpoint-60").mkdir()
    (saved / ".unused-checkpoint-60/x").write_text("hidden")
    (saved / "key").symlink_to("/etc/passwd")
    (saved / "etc").symlink_to("/etc")
    place = tmp_path / "here/x"
    done = bring(program, place)
    assert {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != receive.RECORD
    } == SAVED
    assert (done.node, done.is_program, done.others, done.left_out) == ("laptop", True, ("tower",), ("etc", "key"))
    again = bring(program, place)
    assert not again.changed and [path.name for path in place.parent.iterdir()] == ["x"]
    (place / "checkpoint-40/deep/er/rng.pth").write_bytes(b"mine")
    with pytest.raises(HomelabError, match=r"rng\.pth differs from the fetched file"):
        bring(program, place)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../x", ".hidden/x", "a//x", "key", "etc/passwd", ""])
def test_no_file_outside_of_it_leaves_a_node(program: FakeFleet, tmp_path: Path, name: str) -> None:
    saved = tmp_path / "laptop/runs" / RUN / "saved"
    (saved / "key").symlink_to("/etc/passwd")
    (saved / "etc").symlink_to("/etc")
    request = {"workdir": str(tmp_path / "laptop"), "run": RUN, "folder": "saved", "name": name, "offset": 0, "count": 10}
    with pytest.raises(ValueError, match="not a file of a result"):
        ask_node("result-part", request, io.BytesIO())


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a\\x/..", "a/.x"])
def test_no_node_writes_outside_of_the_folder(program: FakeFleet, tmp_path: Path, name: str) -> None:
    program.answer("saved-files", {"path": "/x", "files": [{"name": name, "size": 1, "sha256": "0" * 64}], "left_out": []}, ["laptop"])
    with pytest.raises(HomelabError, match=r"."):
        bring(program, tmp_path / "here/x")
    assert not list((tmp_path / "here").rglob("x")) if (tmp_path / "here").exists() else True


def test_a_program_that_has_saved_nothing(fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "description_of", lambda paths: SimpleNamespace(recipe=SimpleNamespace(model=None)))
    with pytest.raises(HomelabError, match="has saved nothing") as caught:
        bring(fleet, tmp_path / "here/x")
    assert "homelab logs" in caught.value.hint
