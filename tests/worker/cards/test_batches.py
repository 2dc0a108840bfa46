"""The batches of a step go to a card once: its memory cannot be pinned a second time."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.law.stage import Stage
from homelab.worker.data import batches
from homelab.worker.runtime.switches import Switches
from homelab.worker.strategies.pipeline import passes
from homelab.worker.strategies.pipeline import stages as pipeline
from homelab.worker.strategies.pipeline.neighbours import Neighbours
from homelab.worker.training import trainer
from tests.worker.cards.card import OnCard


@dataclasses.dataclass(frozen=True)
class Item:
    micro_batches: list[dict[str, torch.Tensor]]
    loss_tokens: int = 3
    seeds: tuple[int, ...] = (0,)


def copied(batches: list[dict[str, torch.Tensor]], device: torch.device, *, pin: bool) -> list[dict[str, torch.Tensor]]:
    assert device.type == "cuda"
    return [
        {
            name: (tensor.pin_memory() if pin and isinstance(tensor, OnCard) else tensor).as_subclass(OnCard)
            for name, tensor in batch.items()
        }
        for batch in batches
    ]


@pytest.mark.parametrize("copy_ahead", [True, False])
def test_a_stage_takes_the_batches_that_are_on_its_card(monkeypatch: pytest.MonkeyPatch, copy_ahead: bool) -> None:
    for module in (trainer, pipeline):
        monkeypatch.setattr(module, "copied", copied)
    monkeypatch.setattr(trainer, "torch", SimpleNamespace(tensor=lambda value, device: torch.tensor(value)))
    task = SimpleNamespace(device="cuda", switches=dataclasses.replace(Switches(), copy_ahead=copy_ahead))
    clock = SimpleNamespace(begin=lambda: None, input_ready=lambda: None, count_passes=lambda *_: None)
    mine = SimpleNamespace(
        clock=clock, task=task, hooks=SimpleNamespace(after_pass=None), accelerator=SimpleNamespace(backward=None, autocast=None)
    )
    mine.copies_ahead = trainer.ShareTrainer.copies_ahead.fget(mine)  # type: ignore[attr-defined]
    items = iter([Item([{"input_ids": torch.ones(1, 4, dtype=torch.int64)}])])
    (ready,), count = trainer.ShareTrainer.get_batch_samples(mine, items, 1, torch.device("cuda"))  # type: ignore[arg-type]
    stages: Any = object.__new__(pipeline.Stages)
    stages._device, stages._table = torch.device("cuda", 0), None
    seen: list[dict[str, torch.Tensor]] = []

    def step(batches: list[dict[str, torch.Tensor]], *_rest: Any) -> tuple[float, Any]:
        seen.extend(batches)
        return 0.0, SimpleNamespace(sent_bytes=0, passes_s=[], waited_s=0.0)

    stages._pipeline = lambda *_: SimpleNamespace(step=step)
    stages.run_passes(mine, SimpleNamespace(train=lambda: None), ready, count)
    assert len(seen) == 1 and isinstance(seen[0]["input_ids"], OnCard)


def test_an_evaluation_has_one_batch_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of all rows of a run: what the base model gives to the answers of pairs."""
    copies: list[weakref.ref[torch.Tensor]] = []
    there: list[int] = []

    def noted(*what: Any, **options: Any) -> list[dict[str, Any]]:
        made = batches.copied(*what, **options)
        copies.extend(weakref.ref(batch["input_ids"]) for batch in made)
        return made

    class Model:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8))

        def __call__(self, *, input_ids: torch.Tensor, **_other: Any) -> SimpleNamespace:
            there.append(sum(copy() is not None for copy in copies))
            return SimpleNamespace(loss=input_ids.sum())

    for module in (passes, pipeline):
        monkeypatch.setattr(module, "copied", noted, raising=False)
    stages: Any = object.__new__(pipeline.Stages)
    stages.stage, stages._device, stages._dtype, stages._neighbours = Stage(0, 1, 0, 1, 1), torch.device("cpu"), torch.float32, Neighbours()
    rows = [{"input_ids": torch.full((1, 4), number)} for number in range(5)]
    assert stages.evaluate(Model(), rows, None, lambda: None) == 4 * sum(range(5))
    assert there == [1] * 5


def test_a_system_that_pins_nothing_copies_all_the_same() -> None:
    """Under WSL2 little memory can be pinned, and streamed layers take it first. Here there is no card, and so no pinned memory at all."""
    with pytest.raises(RuntimeError):
        torch.empty(1, pin_memory=True)
    given = [
        {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6, 12).view(2, 3), "weights": torch.rand(2)},
        {"input_ids": torch.arange(4)},
    ]
    there = batches.copied(given, torch.device("cpu"), pin=True)
    assert [{name: tensor.tolist() for name, tensor in batch.items()} for batch in there] == [
        {name: tensor.tolist() for name, tensor in batch.items()} for batch in given
    ]
