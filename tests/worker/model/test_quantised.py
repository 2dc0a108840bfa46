"""The base in NF4 that is kept on the node's disk: the same bits as without it, and never a damaged one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.protocol import lock
from homelab.worker.model import build, quantised_cache, weight_digests
from tests.worker import harness

pytest.importorskip("bitsandbytes")
modeling_utils = pytest.importorskip("transformers.modeling_utils")
SafetensorError = pytest.importorskip("safetensors").SafetensorError


pytestmark = pytest.mark.usefixtures("one_thread")


class Node:
    """A node's disk with a copy of the tiny model, and what its worker said."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = Path(shutil.copytree(source, folder / "tiny"))
        self.said: list[str] = []
        self.task = harness.task_of(folder / "work" / "runs" / "one", model__name=str(self.source), method__kind="qlora")

    def load(self) -> Any:
        self.said.clear()
        with weight_digests.noting_sources():
            return build._load_base(self.task, str(self.source), self.said.append)

    @property
    def kept(self) -> list[Path]:
        """The bases, and whatever else is there but their locks."""
        return sorted(path for path in self.bases.iterdir() if path.suffix != ".lock")

    @property
    def bases(self) -> Path:
        return self.task.run_dir.parent.parent / "bases"


@pytest.fixture
def node(tmp_path: Path, model: Path) -> Node:
    return Node(tmp_path, model)


def changed(node: Node) -> None:
    """Other weights in the model's file."""
    file = node.source / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1001] ^= 1
    file.write_bytes(content)


def logits(loaded: Any) -> torch.Tensor:
    with torch.no_grad():
        return loaded(input_ids=torch.arange(3, 40).unsqueeze(0)).logits


def test_what_is_read_again_is_the_same_bits(node: Node) -> None:
    first = node.load()
    assert "stored for the next start" in node.said[0] and len(node.kept) == 1
    again = node.load()
    assert len(node.said) == 1 and "read from" in node.said[0]
    assert torch.equal(logits(first), logits(again)) and weight_digests.base(first) == weight_digests.base(again)
    assert again.config.to_dict() == first.config.to_dict() and again.name_or_path == str(node.source), "adapters say whose they are"
    assert (
        all(type(part).__name__ == "Linear4bit" for part in weight_digests.quantised(again).values())
        and len(weight_digests.quantised(again)) == 14
    )
    assert not any(part.support_avx512bf16_for_cpu for part in weight_digests.quantised(again).values()), "trainable on a CPU"


@pytest.mark.parametrize("damage", ["bit", "cut", "manifest"])
def test_a_damaged_one_is_made_anew(node: Node, damage: str) -> None:
    first = node.load()
    weights, made = node.kept[0] / "model.safetensors", node.kept[0] / "made.json"
    content = bytearray(weights.read_bytes())
    if damage == "bit":
        content[len(content) - 1000] ^= 4
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    else:
        made.write_text("{}")
    again = node.load()
    assert "damaged" in node.said[0] and "stored for the next start" in node.said[1]
    assert torch.equal(logits(first), logits(again)) and weight_digests.base(first) == weight_digests.base(again)
    assert node.load() is not None and "read from" in node.said[0]


def test_another_source_is_another_base(node: Node) -> None:
    node.load()
    before = node.kept
    changed(node)
    first = node.load()
    assert "stored for the next start" in node.said[0] and len(node.kept) == 1 and node.kept != before, "the old one is gone"
    node.task.plan["precision"] = "bf16"
    halved = node.load()
    assert weight_digests.base(halved) != weight_digests.base(first) and weight_digests.base(node.load()) == weight_digests.base(halved)
    assert "read from" in node.said[0]
    assert quantised_cache.folder_of(node.task.run_dir, node.task.model, str(node.source), torch.bfloat16) == node.kept[0]
    node.task.plan["precision"] = "fp32"
    assert weight_digests.base(node.load()) == weight_digests.base(first) and "read from" in node.said[0], "each precision has its own"
    changed(node)
    before = node.kept
    node.load()
    assert len(node.kept) == 1 and node.kept[0] not in before, "both are of other files"


def test_the_base_of_another_precision_makes_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.load()
    before = node.kept
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9 if before[0].exists() else 10**12))
    node.task.plan["precision"] = "bf16"
    node.load()
    assert len(node.kept) == 1 and node.kept != before and "stored for the next start" in node.said[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left on device"),
        (RuntimeError("a library has errors of its own\nand a stack"), "RuntimeError: a library has errors of its own"),
    ],
)
def test_an_error_of_a_library_ends_no_training(node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def refuses(*_arguments: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(modeling_utils, "safe_save_file", refuses)
    assert node.load() is not None
    assert node.kept == [] and node.said[0].endswith(f": {words}")
    monkeypatch.undo()
    node.load()
    assert "stored for the next start" in node.said[0]


def test_a_full_card_is_no_fault_of_the_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(torch.OutOfMemoryError):
        node.load()
    assert node.kept == []


def test_trainings_that_start_together_leave_each_other_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a card: twelve began at once, and two of them ended because a third one had removed what they were writing."""
    context = multiprocessing.get_context("fork")
    two_write, save = context.Barrier(2), modeling_utils.safe_save_file

    def meeting(*arguments: Any, **options: Any) -> None:
        two_write.wait(60)
        save(*arguments, **options)

    def train(precision: str) -> None:
        node.task.plan["precision"] = precision
        node.load()

    monkeypatch.setattr(modeling_utils, "safe_save_file", meeting)
    trainings = [context.Process(target=train, args=(precision,), daemon=True) for precision in ("fp32", "bf16") * 2]
    for training in trainings:
        training.start()
    for training in trainings:
        training.join(120)
    assert [training.exitcode for training in trainings] == [0] * 4
    assert len(node.kept) == 2, "one for each precision, and nothing half written"
    for precision in ("fp32", "bf16"):
        train(precision)
        assert len(node.said) == 1 and "read from" in node.said[0]


@pytest.mark.parametrize("reads", [True, False])
def test_what_another_training_reads_or_writes_stays(node: Node, reads: bool) -> None:
    node.load()
    (used,) = node.kept
    name = used.name
    if not reads:
        used = used.rename(node.bases / f".{name}.partial")
    (node.bases / f".{name}.2475.partial").mkdir()  # as an older homelab has left it
    with lock.without_waiting(node.bases / f".{name}.lock", shared=reads) as is_mine:
        assert is_mine
        changed(node)
        node.load()
        assert used in node.kept and "stored for the next start" in node.said[0]
    changed(node)
    changed(node)  # to the same bytes at another time
    node.load()
    assert len(node.kept) == 1 and "stored for the next start" in node.said[0]
    assert [path.name for path in node.bases.glob("*.lock")] == [f".{node.kept[0].name}.lock"], "nor do their locks stay"


def test_a_base_that_another_training_stores_is_left_to_it(node: Node) -> None:
    first = node.load()
    (kept,) = node.kept
    quantised_cache.keep(first, kept, node.task, node.said.append, "cpu")
    assert "another training has stored it" in node.said[-1]
    (kept / "made.json").write_text("{}")
    with lock.without_waiting(kept.with_name(f".{kept.name}.lock"), shared=True):
        again = node.load()
        assert "damaged" in node.said[0] and "another training uses" in node.said[1] and (kept / "model.safetensors").is_file()
    assert weight_digests.base(again) == weight_digests.base(first)
    with lock.without_waiting(kept.with_name(f".{kept.name}.lock")):
        assert node.load() is not None and "another training uses" in node.said[0]
    node.load()
    assert "stored for the next start" in node.said[0]


def test_a_card_of_another_kind_quantises_for_itself(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with equal cards are compared bit by bit: one of them must not read the codes of an unlike card beside it."""
    node.load()

    def of(card: str, rank: int = 0) -> str:
        monkeypatch.setattr(quantised_cache, "device_of", lambda _: card)
        node.task = replace(node.task, local_rank=rank)
        node.load()
        return "; ".join(node.said)

    assert "not known to be made by RTX 4070 Ti" in (said := of("RTX 4070 Ti")) and "stored for the next start" in said
    assert "read from" in of("RTX 4070 Ti")
    assert "not known to be made by RTX 3060" in (said := of("RTX 3060", rank=1)) and "stored" not in said
    assert "read from" in of("RTX 4070 Ti"), "what the other rank cannot use stays"
    assert "stored for the next start" in of("RTX 3060") and "read from" in of("RTX 3060", rank=1), "the card was replaced"


def test_it_is_kept_by_one_rank_and_only_where_there_is_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.task = replace(node.task, local_rank=1)
    node.load()
    node.task = replace(node.task, local_rank=0, rank=1, plan={**node.task.plan, "shared_folder": True})
    node.load()
    assert not node.task.run_dir.parent.parent.exists(), "the folder of an exported job is one for all machines"
    node.task = replace(node.task, rank=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    node.load()
    assert node.kept == [] and "is not stored" in node.said[0]
    monkeypatch.undo()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    assert node.load() is not None
    assert node.kept == [] and "No space left" in node.said[0]
