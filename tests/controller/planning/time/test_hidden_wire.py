"""The part of ddp's reduction that the backward pass hides: by hand, and its buckets against those that torch makes."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.time import hidden_wire
from homelab.controller.planning.time.hidden_wire import Bucket, LastPass
from homelab.shared.law.wire_bytes import BUCKET_MB
from homelab.shared.recipe import Method, Train

SHAPE = Architecture(64, 4, 4, 2, 16, 160, 600, tied_embeddings=False)
FULL, LORA = Method(kind="full"), Method(kind="lora", rank=8)


def train(**changes: Any) -> Train:
    return Train(**{"global_batch": 8, "steps": 1, "learning_rate": 1e-3, "gradient_checkpointing": False, "fused_loss": False, **changes})


def test_by_hand() -> None:
    """A pass of 3 s whose backward part is 2 s; four buckets of a second each, ready half a second after each other."""
    buckets = [Bucket(10, ready) for ready in (0.25, 0.5, 0.75, 1.0)]
    one = [LastPass(10.0, 3.0)]
    assert hidden_wire.exposed_s(4.0, buckets, 2 / 3, one) == pytest.approx(2.5), "the wire is the slower one: all but the first begin late"
    assert hidden_wire.exposed_s(0.4, buckets, 2 / 3, one) == pytest.approx(0.1), "only the last one is left"
    assert hidden_wire.exposed_s(4.0, [Bucket(40, 1.0)], 2 / 3, one) == pytest.approx(4.0), "one bucket hides nothing"
    # A bucket waits for the rank that has it last, and nothing is hidden behind a rank without a pass that ends last.
    assert hidden_wire.exposed_s(4.0, buckets, 2 / 3, [*one, LastPass(10.0, 0.3)]) == pytest.approx(3.85)
    assert hidden_wire.exposed_s(4.0, buckets, 2 / 3, [*one, LastPass(11.0, 0.0)]) == pytest.approx(4.0)


def test_the_part_of_the_backward_pass() -> None:
    assert hidden_wire.backward_part(SHAPE, FULL, train()) == pytest.approx(2 / 3)
    assert hidden_wire.backward_part(SHAPE, FULL, train(gradient_checkpointing=True)) > 0.7
    assert 0.5 <= hidden_wire.backward_part(SHAPE, Method(kind="lora", rank=1), train()) < 0.52


@pytest.mark.parametrize(("bucket_mb", "first_mb"), [(BUCKET_MB, 1.0), (0.1, 0.1), (0.05, 0.05)])
@pytest.mark.parametrize("method", [FULL, LORA])
def test_all_gradients_are_in_buckets_of_that_size(method: Method, bucket_mb: float, first_mb: float) -> None:
    buckets = hidden_wire.buckets_of(SHAPE, method, train(), bucket_mb)
    assert sum(bucket.size_bytes for bucket in buckets) == 4 * rank_memory.trainable_parameters(SHAPE, method)
    ready = [bucket.ready for bucket in buckets]
    assert ready == sorted(ready) and ready[-1] == pytest.approx(1.0)
    largest = 4 * max(SHAPE.embedding_parameters, 64 * 160) if method is FULL else 4 * 8 * 160
    assert all(
        size * 2**20 <= bucket.size_bytes < size * 2**20 + largest
        for size, bucket in zip([first_mb] + [bucket_mb] * len(buckets), buckets[:-1], strict=False)
    )


def test_smaller_buckets_hide_more_and_a_table_of_embeddings_is_never_hidden() -> None:
    passes = [LastPass(2.0, 1.0)]
    part = hidden_wire.backward_part(SHAPE, FULL, train())
    exposed = [hidden_wire.exposed_s(0.5, hidden_wire.buckets_of(SHAPE, FULL, train(), size), part, passes) for size in (0.05, 0.2, 1.0)]
    assert exposed == sorted(exposed) and exposed[0] < exposed[-1] == pytest.approx(0.5)
    table = SHAPE.embedding_parameters / SHAPE.total
    assert exposed[0] >= 0.5 * table
