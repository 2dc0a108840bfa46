"""A node without the checkpoint receives it beside NCCL, and what comes after is as if it had had one: no rank waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from homelab.shared.law.speed import Speed
from homelab.worker.checkpoints import broadcast, checkpoint_folder
from homelab.worker.errors import WorkerError
from homelab.worker.strategies.pipeline.neighbours import Neighbours
from tests.worker.cards import ranks
from tests.worker.cards.nccl import Rules
from tests.worker.cards.training import Training

pytestmark = pytest.mark.timeout(60)
STEP, CONTENT = 4, b"weights " * 40
RECORDER: Any = SimpleNamespace(note=lambda _text: None, heartbeat=lambda *_, **__: None)


def made_by(size: int, machines: int = 0) -> Training:
    return Training("hsdp" if machines else "ddp", [Speed(0.0, 1.0, 1.0)] * size, machines=machines, resume_step=STEP)


def play(training: Training, folder: Path, holders: Sequence[int], afterwards: Any) -> str:
    """`holders`: the nodes with a whole copy. `afterwards(rank)` comes when everyone has one."""
    size = len(training.cards)

    def program(rank: int) -> None:
        task = training.task(folder, rank)
        is_whole = int(task.node.removeprefix("node")) in holders
        if is_whole and task.is_keeper:
            checkpoint_folder.write(
                task.checkpoints_dir, STEP, task.recipe_hash, {"trainable.safetensors": lambda path: path.write_bytes(CONTENT)}
            )
        got = broadcast.fetch(task, None if is_whole else WorkerError("it has none", where="here", hint="none"), RECORDER)
        assert got is not None
        afterwards(rank)
        assert not task.is_keeper or (got / "trainable.safetensors").read_bytes() == CONTENT

    with ranks.of(size, Rules(message_s=0.1)) as made:
        return made.play(program)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 64)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_pipeline_begins_after_a_checkpoint_was_sent(tmp_path: Path, size: int) -> None:
    for number, holders in enumerate(([0], [size - 1], list(range(1, size)))):
        assert not play(made_by(size), tmp_path / str(number), holders, lambda rank: Neighbours.of(rank, range(size)))


@pytest.mark.parametrize("holder", [0, 1])
def test_ranks_beside_the_first_of_their_node_count_the_same_groups(tmp_path: Path, holder: int) -> None:
    """Two machines of two cards: the first of each have sent and received, the second of each took no part."""

    def afterwards(rank: int) -> None:
        dist.new_group([0, 1] if rank < 2 else [2, 3], backend="gloo", use_local_synchronization=True)

    assert not play(made_by(4, machines=2), tmp_path, [holder], afterwards)
