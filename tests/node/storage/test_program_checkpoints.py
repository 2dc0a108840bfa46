"""What a program of one's own saves becomes a checkpoint of the run, and is what it finds after a recovery: on every node the same."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from homelab.node.storage import program_checkpoints
from homelab.shared.protocol import files, manifest
from tests.fakes import ask_node

RUN = "2026-01-01-0000-program"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_in(tmp_path / "a")


def run_in(workdir: Path) -> Path:
    folder = workdir / "runs" / RUN
    (folder / "saved").mkdir(parents=True)
    files.write_json(folder / "run.json", {"recipe_hash": "abc"})
    return folder


def trainer(folder: Path, step: int, *, is_whole: bool = True, rank: int = 0) -> Path:
    """A folder as transformers' Trainer writes it."""
    place = folder / "saved" / f"checkpoint-{step}"
    place.mkdir()
    (place / f"rng_state_{rank}.pth").write_text(f"random {rank}")
    if is_whole:
        (place / "model.safetensors").write_text(f"weights {step}")
        (place / "trainer_state.json").write_text("{}")
    return place


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder / "saved") if not name.startswith("."))


def request(workdir: Path, **more: Any) -> dict[str, Any]:
    return {"workdir": str(workdir), "run": RUN, **more}


def test_the_newest_whole_one_counts_and_its_number_is_the_step(run: Path) -> None:
    trainer(run, 5)
    trainer(run, 20)
    trainer(run, 100, is_whole=False)
    (run / "saved" / "step_30.pt.tmp").write_text("half")
    (run / "saved" / ".step_40.pt").write_text("half")
    (run / "saved" / "log.txt").write_text("no number")
    (run / "saved" / "epoch_7").mkdir()  # empty
    answer = ask_node("checkpoints", request(run.parents[1], set_aside=True))
    assert (answer.good, answer.bad) == ((20,), {})
    assert ask_node("manifest", request(run.parents[1], step=20)).recipe_hash == "abc"
    assert ask_node("checkpoints", request(run.parents[1])).good == (20,), "once more changes nothing"


@pytest.mark.parametrize(
    ("name", "step"), [("checkpoint-120", 120), ("step_40.pt", 40), ("epoch_3", 3), ("llama3-run-2-0050.safetensors", 50)]
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_numbers_of_names(name: str, step: int, kind: str) -> None:
    assert program_checkpoints.step_of(name) == step


@pytest.mark.parametrize("name", ["last.pt", "log.txt", ".step_3", "step_3.tmp", "step_3.pt.part", "3", "checkpoint-3.incomplete"])
def test_names_without_a_step(name: str) -> None:
    assert program_checkpoints.step_of(name) is None


def test_two_are_kept(run: Path) -> None:
    for step in (5, 10, 15):
        (run / "saved" / f"step-{step}.pt").write_text(str(step))
        assert program_checkpoints.keep(str(run)) == {}
    assert manifest.steps(run) == [10, 15]


def test_on_another_node_it_is_found_with_what_that_node_has_alone(tmp_path: Path, run: Path) -> None:
    (trainer(run, 20) / "deep" / "er").mkdir(parents=True)
    (run / "saved/checkpoint-20/deep/er/shard.pt").write_text("shard")
    program_checkpoints.keep(str(run))
    other = run_in(tmp_path / "b")
    trainer(other, 20, is_whole=False, rank=1)
    stream = io.BytesIO()
    ask_node("send-checkpoint", request(tmp_path / "a", step=20), stream)
    stream.seek(0)
    ask_node("receive-checkpoint", request(tmp_path / "b", step=20), stream)
    program_checkpoints.restore(str(other), 20)
    assert visible(other) == ["checkpoint-20"]
    place = other / "saved/checkpoint-20"
    assert (place / "model.safetensors").read_text() == "weights 20" and (place / "deep/er/shard.pt").read_text() == "shard"
    assert (place / "rng_state_0.pth").exists() and (place / "rng_state_1.pth").read_text() == "random 1"


def test_no_node_finds_a_newer_one_than_the_others(run: Path) -> None:
    for step in (10, 20):
        (run / "saved" / f"step-{step}.pt").write_text(str(step))
    program_checkpoints.restore(str(run), 10)
    assert visible(run) == ["step-10.pt"]
    program_checkpoints.restore(str(run), 0)
    assert visible(run) == [], "from the beginning"
    assert os.listdir(run / "saved") == [".unused-step-10.pt"], "the newest of what was not used is left"


def test_its_own_copy_is_not_replaced_and_a_lost_one_comes_back(run: Path) -> None:
    (run / "saved" / "step-10.pt").write_text("ten")
    program_checkpoints.keep(str(run))
    (run / "saved" / "step-10.pt").write_text("mine")
    program_checkpoints.restore(str(run), 10)
    assert (run / "saved" / "step-10.pt").read_text() == "mine"
    shutil.rmtree(run / "saved")
    program_checkpoints.restore(str(run), 10)
    assert (run / "saved" / "step-10.pt").read_text() == "ten"


def test_a_start_gives_only_its_name_to_what_was_unpacked_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes are not unpacked while a start keeps everybody else from the run."""
    (run / "saved" / "step-10.pt").write_text("ten")
    program_checkpoints.keep(str(run))
    (run / "saved" / "step-10.pt").unlink()
    (run / "saved" / "step-20.pt").write_text("twenty")
    for _ in range(2):
        ask_node("unpack-checkpoint", request(run.parents[1], step=10))
    assert visible(run) == ["step-20.pt"], "what a program looks at is not touched before its start"
    monkeypatch.delattr(tarfile, "open")
    program_checkpoints.restore(str(run), 10)
    assert visible(run) == ["step-10.pt"] and (run / "saved" / "step-10.pt").read_text() == "ten"
    assert sorted(os.listdir(run / "saved")) == [".unused-step-20.pt", "step-10.pt"]
    ask_node("unpack-checkpoint", request(run.parents[1], step=10))
    assert visible(run) == ["step-10.pt"], "nothing to do where the program has it"


def test_what_a_power_cut_left_half_done_is_removed_and_what_is_under_way_is_not(run: Path) -> None:
    gone, here = 2**22 + 7, os.getpid()
    half = [run / f"checkpoints/.step-00000020.{gone}.partial", run / f"saved/.unpacked-20.{gone}", run / "saved/.unpacked-4711"]
    under_way = [run / f"checkpoints/.step-00000020.{here}.partial", run / f"saved/.unpacked-20.{here}"]
    for place in half + under_way:
        place.mkdir(parents=True)
        (place / "weights").write_text("half")
    ask_node("checkpoints", request(run.parents[1]))
    program_checkpoints.restore(str(run), 0)
    assert not any(place.exists() for place in half) and all(place.exists() for place in under_way)


def test_a_full_disk_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "saved" / "step-10.pt").write_text("ten")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    assert ask_node("checkpoints", request(run.parents[1])).bad == {
        "10": "step-10.pt of the program cannot be kept: No space left on device"
    }
    assert os.listdir(run / "checkpoints") == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x"])
def test_an_archive_that_climbs_is_refused(run: Path, name: str) -> None:
    place = Path(manifest.folder_of(run, 10))
    place.mkdir(parents=True)
    with tarfile.open(place / "saved.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="unexpected entry"):
        program_checkpoints.restore(str(run), 10)
    assert visible(run) == [] and not (run / "x").exists() and not os.path.exists("/x")


def test_a_program_is_told_the_newest_that_is_whole(run: Path) -> None:
    assert program_checkpoints.last_path(str(run)) == ""
    first = trainer(run, 20)
    trainer(run, 40, is_whole=False)
    assert program_checkpoints.last_path(str(run)) == str(first)
    program_checkpoints.restore(str(run), 0)
    assert program_checkpoints.last_path(str(run)) == "", "it begins again"
    assert not program_checkpoints.is_program(str(run))
    files.write_json(run / "run.json", {"recipe": {"script": {"path": "train.py"}}})
    assert program_checkpoints.is_program(str(run))


def test_a_run_that_is_begun_again_has_none(run: Path) -> None:
    """Nor has the next restart of it: those of before have higher numbers."""
    trainer(run, 20)
    assert ask_node("checkpoints", request(run.parents[1])).good == (20,)
    trainer(run, 500)
    (run / "saved" / "vocabulary.json").write_text("{}")
    again = request(run.parents[1], begin_again=True)
    answer = ask_node("checkpoints", again)
    assert (answer.good, answer.bad) == ((), {}) and visible(run) == ["vocabulary.json"]
    assert sorted(path.name for path in (run / "checkpoints.unused").iterdir()) == ["checkpoint-20", "checkpoint-500", "step-00000020"]
    assert ask_node("checkpoints", again).good == () and (run / "checkpoints.unused" / "checkpoint-500").is_dir(), (
        "nothing new replaces them"
    )
    trainer(run, 10)
    assert ask_node("checkpoints", request(run.parents[1])).good == (10,)
    assert ask_node("checkpoints", again).good == ()
    assert sorted(path.name for path in (run / "checkpoints.unused").iterdir()) == ["checkpoint-10", "step-00000010"]
