"""The stand-in sees what it is made for: each rule stops what must stop by it. Without these, no deadlock in a training would mean nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from homelab.shared.law.pipeline_schedule import least_in_flight, most_in_flight
from homelab.worker.checkpoints import weights
from homelab.worker.strategies.pipeline import neighbours
from homelab.worker.strategies.sharded import exchange
from homelab.worker.strategies.sharded import shards as sharded
from tests.worker.cards import ranks
from tests.worker.cards.card import OnCard
from tests.worker.cards.model import FORWARD
from tests.worker.cards.nccl import Rules
from tests.worker.cards.stages import Speeds
from tests.worker.cards.stages import play as play_stages
from tests.worker.cards.test_trainings import training, unequal
from tests.worker.cards.training import play

pytestmark = pytest.mark.timeout(60)
NO_RULE: dict[str, Any] = {"connect": False, "lazy": False}


def on_card() -> torch.Tensor:
    return torch.zeros(4).as_subclass(OnCard)


def reason(program: Callable[[int], None], size: int = 2, rules: Rules | None = None) -> str:
    with ranks.of(size, rules or Rules(message_s=0.1, **NO_RULE)) as made:
        return made.play(program)


# A pipeline whose messages go over NCCL from card to card


@pytest.fixture
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours as they were: a group for each direction of each boundary, receives that are posted ahead, memory of the card."""

    def of(_class: Any, rank: int, stages: Sequence[int]) -> neighbours.Neighbours:
        channels: dict[str, neighbours.Channel] = {}
        for before, behind in itertools.pairwise(stages):
            forth, back = (dist.new_group([before, behind]) for _ in range(2))
            if rank == before:
                channels |= {"behind_out": neighbours.Channel(behind, forth), "behind_in": neighbours.Channel(behind, back)}
            elif rank == behind:
                channels |= {"before_in": neighbours.Channel(before, forth), "before_out": neighbours.Channel(before, back)}
        return neighbours.Neighbours(**channels)

    def send(channel: neighbours.Channel, tensor: torch.Tensor) -> int:
        channel.sent.append((dist.isend(tensor.as_subclass(OnCard), channel.peer, group=channel.group), tensor))
        return tensor.nbytes

    def post(inbox: Any, count: int) -> None:
        for shape in itertools.islice(inbox._left, count):
            tensor = torch.zeros(shape).as_subclass(OnCard)
            inbox._posted.append((dist.irecv(tensor, inbox._channel.peer, group=inbox._channel.group), tensor))

    monkeypatch.setattr(neighbours.Neighbours, "of", classmethod(of))
    monkeypatch.setattr(neighbours.Channel, "send", send)
    monkeypatch.setattr(neighbours.Inbox, "_post", post)


CASES = {
    "connect": (Rules(connect=True, lazy=False, message_s=0.1), "ncclTransportP2pSetup"),
    "lazy": (Rules(connect=False, lazy=True, message_s=0.1), "loads it, and waits for the card, where recv no. 0"),
    "retry": (Rules(retries_at=(0, FORWARD, 1), message_s=0.1, **NO_RULE), "cudaFree"),
}


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("kept", [least_in_flight, most_in_flight])
@pytest.mark.parametrize("rule", CASES)
def test_a_pipeline_over_nccl_stands_still_by_each_rule(by_nccl: None, rule: str, kept: Callable[[int, int], int], stages: int) -> None:
    rules, why = CASES[rule]
    played = play_stages([kept(stage, stages) for stage in range(stages)], Speeds([1.0] * stages, [2.0] * stages), rules, 8)
    assert why in played.deadlock


def test_a_pipeline_over_nccl_measures_the_waits_of_its_stream_as_work(by_nccl: None) -> None:
    """Where none of the three rules stops it: `wait` blocks the stream and not the host."""
    speeds = Speeds([1.0, 0.5, 0.4], [2.0, 1.0, 0.8])
    played = play_stages([3, 2, 1], speeds, Rules(message_s=0.1, **NO_RULE), 12)
    assert not played.deadlock
    assert sum(played.work[2].passes_s) > 1.5 * speeds.busy_s(2, 12)


# Messages and groups


def exchanged(rank: int, *, together: bool) -> None:
    messages = [("send", on_card(), 1 - rank), ("recv", on_card(), 1 - rank)]
    if together:
        dist.batch_isend_irecv(messages)
    for kind, tensor, peer in messages if not together else ():
        getattr(dist, f"i{kind}")(tensor, peer).wait()


@pytest.mark.parametrize("connect", [True, False])
def test_messages_in_both_directions_take_place_together_alone(connect: bool) -> None:
    """One kernel of several messages; one after the other, each side waits for the other's second."""
    rules = Rules(connect=connect, lazy=False, message_s=0.1)
    assert reason(lambda rank: exchanged(rank, together=False), rules=rules) or connect
    assert not reason(lambda rank: exchanged(rank, together=True), rules=rules)


def test_a_smaller_gloo_group_stops_those_outside_of_it() -> None:
    assert "rank 2: group no. 1 of ranks (0, 1) (gloo), ncclCommSplit" in reason(
        lambda _: dist.new_group([0, 1], backend="gloo") and None, 3
    )
    assert not reason(lambda _: dist.new_group([0, 1], backend="gloo", use_local_synchronization=True) and None, 3)


def test_members_that_have_counted_other_groups_do_not_meet() -> None:
    def program(rank: int) -> None:
        for members in ([0, 1], [1, 2]):
            dist.new_group(members, backend="gloo", use_local_synchronization=True)

    assert "rank 2: group of ranks (1, 2) as no. 1" in reason(program, 3)


def test_a_host_that_waits_for_gloo_before_it_sends_stands_still() -> None:
    def program(rank: int) -> None:
        group = dist.new_group(backend="gloo")
        dist.irecv(torch.zeros(4), 1 - rank, group=group).wait()
        dist.isend(torch.zeros(4), 1 - rank, group=group).wait()

    assert "the end of recv no. 0" in reason(program)


# Collectives of a training


@contextlib.contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def test_a_save_in_another_order_on_one_rank_stands_still(tmp_path: Path) -> None:
    own = weights.trained

    def trained(model: Any) -> dict[str, torch.Tensor]:
        return dict(sorted(own(model).items(), reverse=dist.get_rank() == 1))

    with changed(weights, "trained", trained):
        assert "rank 1: all_gather of" in play(training("zero2", unequal(2), steps=2), tmp_path).deadlock


def test_a_save_of_those_who_write_alone_stands_still(tmp_path: Path) -> None:
    own = sharded.Shards.state

    def state(self: Any, trainer: Any) -> dict[str, Any]:
        return own(self, trainer) if self._task.is_keeper else {}

    with changed(sharded.Shards, "state", state):
        assert play(training("hsdp", unequal(4), steps=2), tmp_path).deadlock


def test_unlike_numbers_of_passes_stand_still_where_each_gathers_weights(tmp_path: Path) -> None:
    with changed(sharded.Shards, "_gather", lambda _self, _model, passes: passes):
        assert play(training("zero3", unequal(5), steps=2), tmp_path).deadlock


def test_the_sums_of_other_parts_are_no_work(tmp_path: Path) -> None:
    """The timer that knows nothing of them, as it was."""
    with changed(exchange.Exchange, "told", lambda _self, post_backward: post_backward):
        assert play(training("zero2", unequal(2), steps=4), tmp_path, Rules(message_s=0.05)).error > 0.5
