"""Every group of a training waits for a late rank as long as the first one does, not for the time that torch takes on its own."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from homelab.worker.strategies.sharded import shards as sharded


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_the_groups_of_hsdp_are_as_patient_as_the_first(four_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMELAB_PATIENCE_S", "5400")
    limits: dict[str, datetime.timedelta] = {}
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.update({group.group_name: limit}))
    strategy: Any = object.__new__(sharded.Shards)
    strategy._task = SimpleNamespace(strategy="hsdp", device="cpu", world_size=4, nodes=["a", "a", "b", "b"])
    mesh = strategy._mesh_of_ranks()
    assert mesh.shape == (2, 2)
    assert limits == {mesh.get_group(dimension).group_name: datetime.timedelta(seconds=5400) for dimension in range(2)}
