"""Where a stage is for a question: the room that is reckoned is that of what will be loaded there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from homelab.shared.law.stage import Stage
from homelab.worker.checkpoints import async_save
from homelab.worker.model import stored_weights
from homelab.worker.tools import footprint, stage_chat

GB = 10**9


@pytest.mark.parametrize(
    ("device", "card_gb", "ram_gb", "card"),
    [
        ("cuda", 3, 5, 0),  # the card streams: it holds 2 of the 10 layers
        ("cuda", 1, 5, "no room"),  # it is busy, and RAM would hold all of them
        ("cuda", 1, 11, None),
        ("cuda", None, 5, "no room"),  # its driver is gone
        ("cpu", None, 5, None),  # a CPU streams, too
    ],
)
def test_a_stage_that_streams_to_its_card_is_whole_in_ram(
    monkeypatch: pytest.MonkeyPatch, device: str, card_gb: int | None, ram_gb: int, card: int | str | None
) -> None:
    """Each layer is one GB."""
    stage = Stage(0, 2, 0, 10, 20)
    task: Any = SimpleNamespace(
        stage=stage, streaming=SimpleNamespace(layers=10, places=2), device=device, local_rank=0, nodes=["a", "b"], node="a", run={}, method=None,
        model=SimpleNamespace(revision=None),
    )  # fmt: skip
    monkeypatch.setattr(stored_weights, "wanted", lambda method: None)
    monkeypatch.setattr(footprint, "answer_bytes", lambda *_, stage, **__: (stage.end - stage.begin) * GB)
    monkeypatch.setattr(async_save, "available_bytes", lambda: ram_gb * GB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card_gb is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((card_gb or 0) * GB, 24 * GB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    if card == "no room":
        with pytest.raises(footprint.NoRoom, match=r"needs about 10\.00 GB"):
            stage_chat._place(task, "/m", torch.float32, 10)
        return
    assert stage_chat._place(task, "/m", torch.float32, 10).card == card
