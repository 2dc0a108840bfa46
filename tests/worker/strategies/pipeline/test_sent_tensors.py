"""What a stage sends of its tensors: the same bits arrive, in few messages, whatever their kinds and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from homelab.worker.runtime import process_group
from homelab.worker.strategies.pipeline import stages_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.float64)


class Wire:
    """The messages of a sender, kept for the receiver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[torch.Tensor] = []
        self.monkeypatch = monkeypatch

    def pass_on(self, own: dict[str, torch.Tensor], *, is_kept: bool = True) -> dict[str, torch.Tensor]:
        """What rank 1 has after rank 0 has sent `own`."""
        lengths: list[float] = []

        def gather(values: list[float]) -> list[list[float]]:
            lengths.extend(values)
            return [lengths[:1]]

        def broadcast(tensor: torch.Tensor, source: int, device: Any) -> torch.Tensor:
            if dist.get_rank() == source:
                self.sent.append(tensor.clone())
                return tensor
            return tensor.copy_(self.sent[next(number)])

        number = iter(range(10**6))
        self.monkeypatch.setattr(process_group, "gather", gather)
        self.monkeypatch.setattr(stages_state, "_broadcast", broadcast)
        for rank in (0, 1):
            self.monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            received = stages_state._of_rank(0, own if rank == 0 else {}, torch.device("cpu"), is_kept=is_kept)
        assert next(number) == len(self.sent), "all of it was taken"
        return received


@given(
    piece_bytes=st.sampled_from([8, 64, 4096]),
    shapes=st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=3)), max_size=12),
)
def test_the_same_bits_arrive(piece_bytes: int, shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    own = {f"{number}": torch.randint(0, 100, shape).to(kind) for number, (kind, shape) in enumerate(shapes)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(stages_state, "_PIECE_BYTES", piece_bytes)
        wire = Wire(monkeypatch)
        received = wire.pass_on(own)
    assert list(received) == list(own)
    assert all(
        one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
        for one, other in zip(received.values(), own.values(), strict=True)
    )
    assert all(len(message) <= piece_bytes for message in wire.sent[1:]), "a card has room for one piece"


def test_an_adapter_is_one_message_and_who_keeps_nothing_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {f"layer.{number}": torch.ones(64, 16) for number in range(448)}
    wire = Wire(monkeypatch)
    assert wire.pass_on(own, is_kept=False) == {}
    assert len(wire.sent) == 2  # what comes, and all of it
