"""The collective smoke test's own numbers: exact patterns, wrong elements counted, bus bandwidth as nccl-tests defines it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from homelab.worker.tools import collective_check as collective_check
from homelab.worker.tools.rank_state import StateFile

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert collective_check.bus_bandwidth(1_000_000, 2, 0.01) == pytest.approx(1e8)  # two ranks: each sends all of it once
    assert collective_check.bus_bandwidth(3_000_000, 3, 0.04) == pytest.approx(1e8)
    assert collective_check.bus_bandwidth(8, 1, 0.01) == 0


def test_sums_of_the_pattern_are_exact() -> None:
    base = collective_check.pattern(64_000_000, CPU)
    assert base.numel() == 16_000_000 and base.min() == 1 and base.max() == collective_check.PERIOD
    ranks = 64
    total = sum(base[: 2 * collective_check.PERIOD].double() * (rank + 1) for rank in range(ranks))
    assert torch.equal(base[: 2 * collective_check.PERIOD] * (ranks * (ranks + 1) // 2), total.float())


def test_right_sums_are_right(group: None) -> None:
    found = collective_check.measure(1_000_000, 0, 1, CPU)
    assert found["wrong"] == 0 and found["first_wrong"] is None and found["seconds"] > 0


def test_one_wrong_element_of_many_is_seen(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def with_a_flipped_bit(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        done = real(tensor, *arguments, **options)
        if tensor.numel() == 250_000:
            tensor[249_999] += 1
        return done

    monkeypatch.setattr(dist, "all_reduce", with_a_flipped_bit)
    found = collective_check.measure(1_000_000, 0, 1, CPU)
    assert found["wrong"] == 1 and found["first_wrong"].startswith("element 249999 is ")


def test_a_size_that_would_take_too_long_is_left_out(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        collective_check, "measure", lambda size_bytes, *_: {"size_bytes": size_bytes, "seconds": 1.15 if size_bytes > 8 else 1e-3}
    )
    monkeypatch.setattr(collective_check, "_store", lambda patience: dist.FileStore(str(tmp_path / "other"), 1))
    stage = StateFile(tmp_path, 0)
    collective_check.run("gloo", stage)
    assert stage.known["stage"] == "done"
    assert [entry["size_bytes"] for entry in stage.known["results"]] == [8, 1_000_000, 64_000_000]
    assert stage.known["results"][2] == {"size_bytes": 64_000_000, "predicted_s": pytest.approx(73.6)}
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "last"), 1), rank=0, world_size=1)  # for the fixture
