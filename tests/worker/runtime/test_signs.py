"""A rank's signs of life between two steps: one per pass, and so seldom that they cost nothing."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.worker.runtime import metrics_recorder

pytestmark = pytest.mark.timeout(60)


def test_a_pass_is_a_sign_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    task: Any = SimpleNamespace(rank=0, rank_dir=tmp_path, resume_step=7)
    recorder = metrics_recorder.Recorder(task)

    def said() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "heartbeat.json").read_text())
        return found

    recorder.heartbeat("training")
    for _ in range(5):
        recorder.sign()
    assert said()["passes"] == 0, "nothing is written in the same second"
    now_s += metrics_recorder.SIGN_S
    recorder.sign()
    assert (said()["passes"], said()["phase"], said()["step"]) == (6, "training", 7)
    recorder.heartbeat("evaluating")
    now_s += metrics_recorder.SIGN_S
    recorder.sign()
    assert (said()["passes"], said()["phase"]) == (7, "evaluating"), "a pass of an evaluation is one, too"


def test_who_has_connected_is_waited_for_longer_than_who_never_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a node that is slowed down takes minutes: it must not end the others' wait in a collective."""
    import torch
    import torch.distributed as dist

    from homelab.worker.runtime import process_group

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "alone"}
    for name, value in (names | {"HOMELAB_DDP_TIMEOUT_S": "20", "HOMELAB_PATIENCE_S": "300", "OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    task: Any = SimpleNamespace(world_size=2, attempt=1, local_rank=0, backend="gloo", plan={})
    process_group.connect(task)
    try:
        group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert group.options._timeout.total_seconds() == 300
    finally:
        process_group.disconnect()


def test_on_a_card_a_sign_tells_that_a_pass_is_done_and_not_that_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from homelab.worker.runtime.step_timer import StepTimer

    queued: list[Event] = []
    done: list[Event] = []

    class Event:
        def __init__(self, enable_timing: bool, blocking: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream is None, "the current one"
            queued.append(self)

        def synchronize(self) -> None:
            done.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepTimer("cuda")
    for number in range(3):
        with clock.one_pass():
            pass
        assert len(queued) == 2 * (number + 1)
        clock.keep_up()
    assert done == [queued[1], queued[3]], "the ends of the first two passes; the third is still on its way"
