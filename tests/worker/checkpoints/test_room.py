"""Before a checkpoint is written there is room for it, or one error in the words of a full disk; the newest whole one always stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.worker.checkpoints import checkpoint_folder, disk_space
from homelab.worker.errors import WorkerError

pytestmark = pytest.mark.timeout(120)

SIZE = 10_000


def save(root: Path, step: int) -> None:
    checkpoint_folder.write(root, step, "r1", {"a.bin": lambda path: path.write_bytes(bytes(SIZE))})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints 10, 20 and 30, and a damaged one that was kept."""
    monkeypatch.setattr(disk_space, "MARGIN_BYTES", 0)
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        save(root, step)
    (root / ".step-00000005.corrupt").mkdir()
    (root / ".step-00000005.corrupt" / "a.bin").write_bytes(bytes(SIZE))
    return root


def disk(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """A disk that holds nothing but the checkpoints."""
    monkeypatch.setattr(disk_space, "_free_bytes", lambda root: size_bytes - sum(file.stat().st_size for file in root.rglob("a.bin")))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_where_there_is_room_nothing_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(root)
    disk(monkeypatch, 5 * SIZE)
    disk_space.make(root, 40, SIZE, keep=1)
    assert names(root) == before


def test_evidence_goes_first_then_the_oldest_and_no_more_than_needed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 4 * SIZE)
    disk_space.make(root, 40, SIZE, keep=2)
    assert names(root) == ["step-00000010", "step-00000020", "step-00000030"]
    disk(monkeypatch, 3 * SIZE)
    disk_space.make(root, 40, SIZE, keep=2)
    assert names(root) == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize(("keep", "stays"), [(1, [30]), (2, [30]), (3, [20, 30]), (9, [10, 20, 30])])
def test_what_retention_would_keep_stays_however_full_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, keep: int, stays: list[int]
) -> None:
    disk(monkeypatch, len(stays) * SIZE + 1)
    with pytest.raises(WorkerError, match=r"checkpoint of step 40 cannot be written: No space left on device") as caught:
        disk_space.make(root, 40, SIZE, keep)
    assert f"it needs {SIZE} bytes, 1 bytes are free" in caught.value.message
    assert caught.value.where == str(root) and "df -h" in caught.value.hint
    assert checkpoint_folder.complete_steps(root) == stays


def test_later_ones_that_were_not_gone_on_from_do_not_count_as_the_newest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 3 * SIZE)
    disk_space.make(root, 25, SIZE, keep=1)
    assert checkpoint_folder.complete_steps(root) == [20, 30], "20 is the newest one before step 25"


def test_the_size_of_the_state_is_known_before_it_is_written(tmp_path: Path) -> None:
    import torch

    from homelab.worker.checkpoints.tensor_files import writers_of
    from homelab.worker.checkpoints.weights import WEIGHTS

    class Trainer:
        model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 10))
        optimizer = torch.optim.AdamW(model[1].parameters())

    Trainer.model[0].requires_grad_(False)
    Trainer.model(torch.ones(1, 300)).sum().backward()
    Trainer.optimizer.step()
    trained = {name: weight.detach() for name, weight in Trainer.model.named_parameters() if weight.requires_grad}
    state = {WEIGHTS: trained, "optimizer.pt": Trainer.optimizer.state_dict()}
    folder = checkpoint_folder.write(tmp_path, 1, "r1", writers_of(state))
    written = sum(file.stat().st_size for file in folder.iterdir())
    assert 0 <= written - disk_space.of_state(state) <= disk_space.MARGIN_BYTES // 10
