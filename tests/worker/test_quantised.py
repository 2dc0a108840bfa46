"""The base in NF4 that is kept on the node's disk: the same bits as without it, and never a damaged one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.worker import digests, model, quantised

pytest.importorskip("bitsandbytes")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost a busy machine far more than these tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Node:
    """A node's disk with a copy of the tiny model, and what its worker said."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = Path(shutil.copytree(source, folder / "tiny"))
        self.said: list[str] = []
        names: dict[str, dict[str, Any]] = {"model": {"name": str(self.source)}}
        self.task: Any = SimpleNamespace(run_dir=folder / "work" / "runs" / "one", section=names.get, local_rank=0, node="here", device="cpu", precision="fp32")

    def load(self) -> Any:
        self.said.clear()
        with digests.noting_sources():
            return model._load_base(self.task, str(self.source), "qlora", self.said.append)

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
    assert "kept for the next start" in node.said[0] and len(node.kept) == 1
    again = node.load()
    assert len(node.said) == 1 and "read from" in node.said[0]
    assert torch.equal(logits(first), logits(again)) and digests.base(first) == digests.base(again)
    assert all(type(part).__name__ == "Linear4bit" for part in digests.quantised(again).values()) and len(digests.quantised(again)) == 14
    assert not any(part.support_avx512bf16_for_cpu for part in digests.quantised(again).values()), "trainable on a CPU"


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
    assert "damaged" in node.said[0] and "kept for the next start" in node.said[1]
    assert torch.equal(logits(first), logits(again)) and digests.base(first) == digests.base(again)
    assert node.load() is not None and "read from" in node.said[0]


def test_another_source_is_another_base(node: Node) -> None:
    node.load()
    before = node.kept
    file = node.source / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1001] ^= 1
    file.write_bytes(content)
    first = node.load()
    assert "kept for the next start" in node.said[0] and len(node.kept) == 1 and node.kept != before, "the old one is gone"
    node.task.precision = "bf16"
    halved = node.load()
    assert digests.base(halved) != digests.base(first) and digests.base(node.load()) == digests.base(halved)
    assert "read from" in node.said[0]
    assert quantised.folder_of(node.task, str(node.source), torch.bfloat16) == node.kept[0]


def test_it_is_kept_by_one_rank_and_only_where_there_is_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.task.local_rank = 1
    node.load()
    assert not node.task.run_dir.parent.parent.exists()
    node.task.local_rank = 0
    monkeypatch.setattr(quantised.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    node.load()
    assert node.kept == [] and "is not kept" in node.said[0]
    monkeypatch.undo()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(quantised.os, "replace", full)
    assert node.load() is not None
    assert node.kept == [] and "No space left" in node.said[0]
