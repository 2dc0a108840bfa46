"""The base in NF4 that is kept on the node's disk: the same bits as without it, and never a damaged one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.worker.model import build, quantised_cache, weight_digests
from tests.worker import harness

pytest.importorskip("bitsandbytes")


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
        return sorted((self.task.run_dir.parent.parent / "bases").iterdir())


@pytest.fixture
def node(tmp_path: Path, model: Path) -> Node:
    return Node(tmp_path, model)


def logits(loaded: Any) -> torch.Tensor:
    with torch.no_grad():
        return loaded(input_ids=torch.arange(3, 40).unsqueeze(0)).logits


def test_what_is_read_again_is_the_same_bits(node: Node) -> None:
    first = node.load()
    assert "stored for the next start" in node.said[0] and len(node.kept) == 1
    again = node.load()
    assert len(node.said) == 1 and "read from" in node.said[0]
    assert torch.equal(logits(first), logits(again)) and weight_digests.base(first) == weight_digests.base(again)
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
    file = node.source / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1001] ^= 1
    file.write_bytes(content)
    first = node.load()
    assert "stored for the next start" in node.said[0] and len(node.kept) == 1 and node.kept != before, "the old one is gone"
    node.task.plan["precision"] = "bf16"
    halved = node.load()
    assert weight_digests.base(halved) != weight_digests.base(first) and weight_digests.base(node.load()) == weight_digests.base(halved)
    assert "read from" in node.said[0]
    assert quantised_cache.folder_of(node.task, str(node.source), torch.bfloat16) == node.kept[0]


def test_it_is_kept_by_one_rank_and_only_where_there_is_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.task = replace(node.task, local_rank=1)
    node.load()
    assert not node.task.run_dir.parent.parent.exists()
    node.task = replace(node.task, local_rank=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    node.load()
    assert node.kept == [] and "is not stored" in node.said[0]
    monkeypatch.undo()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    assert node.load() is not None
    assert node.kept == [] and "No space left" in node.said[0]
