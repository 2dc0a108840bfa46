"""A checkpoint counts only when its manifest says so, and is never loaded when anything about it is wrong."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest

from homelab.shared.protocol import manifest as shared_manifest
from homelab.shared.protocol.manifest import MANIFEST
from homelab.shared.recipe import Checkpoint
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError

pytestmark = pytest.mark.timeout(30)


def save(root: Path, step: int, *, recipe_hash: str = "r1", content: bytes = b"weights") -> Path:
    writers = {"a.bin": lambda path: path.write_bytes(content), "b.json": lambda path: path.write_text("{}")}
    return checkpoint_folder.write(root, step, recipe_hash, writers)


def test_what_was_written_is_verified(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    assert folder.name == "step-00000020"
    verified = checkpoint_folder.verify(folder, "r1")
    assert verified["step"] == 20
    assert verified["files"]["a.bin"]["bytes"] == 7
    assert shared_manifest.fault(folder) is None, "the agent reads it by the same rules"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    (folder / "a.bin").write_bytes(b"weig")
    with pytest.raises(WorkerError, match="4 bytes instead of 7") as caught:
        checkpoint_folder.verify(folder, "r1")
    assert "a.bin" in caught.value.where and "homelab recover" in caught.value.hint
    assert checkpoint_folder.read_manifest(folder) is None


def test_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    content = bytearray((folder / "a.bin").read_bytes())
    content[3] ^= 1
    (folder / "a.bin").write_bytes(content)
    with pytest.raises(WorkerError, match="sha256"):
        checkpoint_folder.verify(folder, "r1")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    (folder / "b.json").unlink()
    with pytest.raises(WorkerError, match="missing"):
        checkpoint_folder.verify(folder, "r1")


def test_one_that_was_removed_since_is_not_told_as_damaged(tmp_path: Path) -> None:
    """Whoever types the commands of a recovered run by hand after its end finds newer ones alone."""
    for step in (1060, 1070):
        save(tmp_path, step)
    with pytest.raises(WorkerError, match=r"no longer on this node: \[checkpoint\] keep") as caught:
        checkpoint_folder.verify(tmp_path / "step-00000250", "r1")
    assert (
        "set resume_step" in caught.value.hint and caught.value.hint.endswith("1060, 1070") and "remove the folder" not in caught.value.hint
    )


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 20, recipe_hash="r1")
    with pytest.raises(WorkerError, match="another recipe") as caught:
        checkpoint_folder.verify(folder, "r2")
    assert "new run" in caught.value.hint


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"step": 20}', '{"step": 20, "files": 3, "recipe_hash": "r1", "schema": 1}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = save(tmp_path, 20)
    (folder / MANIFEST).write_text(manifest)
    with pytest.raises(WorkerError, match="manifest"):
        checkpoint_folder.verify(folder, "r1")
    assert checkpoint_folder.read_manifest(folder) is None


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 20).rename(tmp_path / "step-00000030")
    with pytest.raises(WorkerError, match="step 20"):
        checkpoint_folder.verify(folder, "r1")


def test_a_failed_write_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 20)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkerError, match=r"step 40.*No space left"):
        checkpoint_folder.write(tmp_path, 40, "r1", {"a.bin": fail})
    assert checkpoint_folder.complete_steps(tmp_path) == [20]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_a_refusal_in_the_words_of_the_library_that_writes_is_the_disks(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    def write(path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # what a disk can refuse without being full
        try:
            save_file({"a": zeros(10_000)}, str(path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(WorkerError, match="step 40 cannot be written: File too large"):
        checkpoint_folder.write(tmp_path, 40, "r1", {"a.safetensors": write})
    assert not list(tmp_path.iterdir())


def test_what_is_not_about_the_disk_is_not_told_as_such(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("a tensor has no storage")

    with pytest.raises(RuntimeError, match="no storage"):
        checkpoint_folder.write(tmp_path, 40, "r1", {"a.bin": fail})
    assert not list(tmp_path.iterdir())


def test_an_attempt_that_was_replaced_completes_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for attempt in (1, 2):
        (tmp_path / "attempts" / str(attempt)).mkdir(parents=True)
        (tmp_path / "attempts" / str(attempt) / "plan.json").touch()
    (tmp_path / "attempts" / "7").mkdir()  # somebody's empty folder
    writers = {"a.bin": lambda path: path.write_bytes(b"weights")}
    assert json.loads((checkpoint_folder.write(root, 20, "r1", writers, attempt=2) / MANIFEST).read_text())["attempt"] == 2
    with pytest.raises(WorkerError, match="attempt 2 has replaced this one") as caught:
        checkpoint_folder.write(root, 40, "r1", writers, attempt=1)
    assert caught.value.where.endswith("attempts/2") and "homelab status" in caught.value.hint
    assert [entry.name for entry in root.iterdir()] == ["step-00000020"]


def test_one_of_before_manifests_named_the_attempt_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["attempt"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint_folder.verify(folder, "r1")["step"] == 20 and checkpoint_folder.complete_steps(tmp_path) == [20]


def test_damaged_ones_left_by_an_earlier_attempt_do_not_outlive_the_good(tmp_path: Path) -> None:
    for step in (20, 40, 25):
        save(tmp_path, step)
    checkpoint_folder.retain(tmp_path, 1, newest=25)
    assert checkpoint_folder.complete_steps(tmp_path) == [25, 40]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 20, content=b"of the first attempt")
    folder = save(tmp_path, 20, content=b"of the second")
    assert (folder / "a.bin").read_bytes() == b"of the second"
    checkpoint_folder.verify(folder, "r1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_the_last_k_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert [folder.name for folder in checkpoint_folder.retain(tmp_path, 2)] == ["step-00000010", "step-00000020"]
    assert checkpoint_folder.complete_steps(tmp_path) == [30, 40]


def test_a_kept_one_stays_and_takes_no_place_of_the_last_k(tmp_path: Path) -> None:
    is_kept = Checkpoint(keep_every=20).is_kept
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    assert [folder.name for folder in checkpoint_folder.retain(tmp_path, 2, is_kept=is_kept)] == ["step-00000010", "step-00000030"]
    assert checkpoint_folder.complete_steps(tmp_path) == [20, 40, 50]


def test_a_removal_that_is_interrupted_leaves_no_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)

    def killed(folder: Path) -> None:
        (folder / "a.bin").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        checkpoint_folder.retain(tmp_path, 1)
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-00000020"]
    checkpoint_folder.clear_partial(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_somebodys_copy_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    for name in ("step-9999", "step-00000040", "step-00000030-copy"):
        shutil.copytree(tmp_path / "step-00000030", tmp_path / name)
    assert checkpoint_folder.complete_steps(tmp_path) == [10, 20, 30]
    assert [folder.name for folder in checkpoint_folder.retain(tmp_path, 1)] == ["step-00000010", "step-00000020"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000030", "step-00000030-copy", "step-00000040", "step-9999"]


def test_the_only_good_one_is_never_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (20, 30):
        (save(tmp_path, step) / "a.bin").write_bytes(b"cut")
    assert checkpoint_folder.retain(tmp_path, 1) == []
    assert checkpoint_folder.complete_steps(tmp_path) == [10]
    assert checkpoint_folder.retain(tmp_path, 0) == []
    checkpoint_folder.verify(tmp_path / "step-00000010", "r1")


def test_leftovers_of_a_killed_write_are_cleared_and_what_was_moved_aside_returns(tmp_path: Path) -> None:
    save(tmp_path, 20).rename(tmp_path / ".step-00000020.123.old")
    (tmp_path / ".step-00000040.123.partial").mkdir()
    checkpoint_folder.clear_partial(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]
    checkpoint_folder.verify(tmp_path / "step-00000020", "r1")


def test_the_manifest_has_the_agreed_shape(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 20) / MANIFEST).read_text())
    assert set(manifest) == {"schema", "step", "recipe_hash", "attempt", "files", "time"}
    assert set(manifest["files"]["a.bin"]) == {"bytes", "sha256"}
