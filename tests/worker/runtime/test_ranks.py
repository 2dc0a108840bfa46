"""Taking a card and leaving the group, without a card: what torch would say is put in its place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from homelab.worker.errors import WorkerError
from homelab.worker.runtime import process_group
from homelab.worker.runtime.task import Task
from homelab.worker.training.run import Run

pytestmark = pytest.mark.timeout(30)
PLAN = {
    "ranks": [
        {"rank": 0, "node": "tower", "device_name": "RTX 4090", "card": "GPU-0a"}, {"rank": 1, "node": "tower", "device_name": "RTX 4090", "card": "GPU-0b"},
        {"rank": 2, "node": "laptop", "device_name": "RTX 3070"},
    ]
}  # fmt: skip


@pytest.mark.parametrize(("there", "said"), [(2, ""), (1, "torch sees 1 of the 2 cards of the plan here"), (0, "torch sees no GPU here")])
def test_a_card_that_is_gone_since_the_plan_was_made(monkeypatch: pytest.MonkeyPatch, there: int, said: str) -> None:
    taken: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    has_cudnn_attention: list[bool] = []
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", has_cudnn_attention.append)
    task = Task(Path(), 1, "tower", 1, 1, 2, {}, {"device": "cuda", **PLAN})
    if not said:
        process_group.claim_device(task)
        assert taken == [1]
        assert has_cudnn_attention == [False], "it plans anew for each length of a pass"
        return
    with pytest.raises(WorkerError) as caught:
        process_group.claim_device(task)
    parts = caught.value.as_dict()
    assert said in parts["message"] and parts["where"] == "node tower, card RTX 4090 GPU-0b" and parts["hint"] and not taken


@pytest.mark.parametrize(("backend", "left"), [("gloo", 1), ("nccl", 0)])
def test_a_group_of_nccl_is_left_by_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch, backend: str, left: int) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: backend)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: calls.append("destroyed"))
    process_group.disconnect()
    assert len(calls) == left


def test_a_rank_says_that_it_is_done_before_it_leaves_the_group() -> None:
    phases: list[str] = []
    task = SimpleNamespace(rank=1, world_size=1, method=SimpleNamespace(kind="lora"))
    run = SimpleNamespace(
        recorder=SimpleNamespace(heartbeat=phases.append), tensorboard=None, end_profile=None, task=task, window=SimpleNamespace(is_asked=False),
        curves=SimpleNamespace(agree=lambda: phases.append("agreed")), _write_final=lambda trainer: phases.append("written"),
    )  # fmt: skip
    cast(Any, Run)._finish(run, SimpleNamespace(model=None))
    assert phases == ["saving", "agreed", "written", "done"]
