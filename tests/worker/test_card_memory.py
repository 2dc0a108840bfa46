"""What a card holds beside torch's memory: measured, kept with the speeds, in the plan's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from homelab.planning import memory  # noqa: E402
from homelab.planning.measured import Measured  # noqa: E402
from homelab.worker import card_memory, speeds  # noqa: E402
from homelab.worker.balance import Report  # noqa: E402
from homelab.worker.speed import Speed  # noqa: E402
from homelab.worker.task import Task  # noqa: E402

MIB = 1 << 20


def task(*cards: str, optimizer: str = "adamw", device: str = "cuda") -> Task:
    """A node with these cards, of 8192 MiB, of which others hold 300."""
    items = [{"name": memory.HELD, "size_bytes": 300 * MIB}, {"name": memory.GRADIENTS, "size_bytes": 77 * MIB}]
    ranks = [
        {"rank": n, "node": "n", "local_rank": n, "device_name": card, "memory": {"items": items, "available_bytes": 8192 * MIB}}
        for n, card in enumerate(cards)
    ]
    recipe = {
        "model": {"name": "m"}, "method": {"kind": "lora", "rank": 8, "targets": "all-linear"}, "parallel": {},
        "train": {"optimizer": optimizer, "gradient_checkpointing": True, "seq_len": 64},
    }  # fmt: skip
    run = {"recipe": recipe, "data": {"train": {"sha256": "ab"}}}
    plan = {"ranks": ranks, "device": device, "precision": "bf16"}
    return Task(run_dir=Path("/w/runs/r"), attempt=1, node="n", rank=0, local_rank=0, world_size=2, run=run, plan=plan)


def test_it_is_what_neither_others_nor_torch_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2000 * MIB, 7950 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5280 * MIB)
    assert card_memory.beside_torch_bytes(task("A")) == (8192 - 300 - 2000 - 5280) * MIB == 612 * MIB
    assert card_memory.beside_torch_bytes(task("A", optimizer="paged_adamw_8bit")) is None
    assert card_memory.beside_torch_bytes(task("A", device="cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2600 * MIB, 7950 * MIB))
    assert card_memory.beside_torch_bytes(task("A")) is None, "others have freed memory: less than a context is no measurement"
    unknown = task("A")
    unknown.plan["ranks"][0]["memory"] = None
    assert card_memory.beside_torch_bytes(unknown) is None


def test_it_is_kept_for_the_cards_of_one_kind() -> None:
    report = Report(Speed(0.1, 0.1, 0.1), 10, 1.0, 1.0, 0.1)
    found: dict[str, Any] | None = speeds.content(
        task("A", "B", "A"), [report] * 3, steps=9, sync_s=[], row_tokens=[5, 6], save_s=None, evaluate_s=None, torch_version="2",
        beside_torch_bytes=612 * MIB,
    )  # fmt: skip
    assert found
    assert [rank.beside_torch_bytes for rank in Measured.model_validate(found).ranks] == [612 * MIB, None, 612 * MIB]


def test_the_plan_calls_others_memory_the_same() -> None:
    assert card_memory.HELD == memory.HELD
