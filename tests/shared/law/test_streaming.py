"""The order in which streamed layers come: how often, and that the layer that computes is there."""

from __future__ import annotations

import itertools

import pytest

from homelab.shared.law import streaming
from homelab.shared.law.streaming import PlaceBook


@pytest.mark.parametrize(("begin", "end", "count"), [(0, 8, 8), (0, 8, 3), (5, 25, 7), (3, 4, 1), (0, 80, 0)])
def test_streamed_layers_are_spread(begin: int, end: int, count: int) -> None:
    layers = streaming.streamed(begin, end, count)
    assert len(set(layers)) == count and all(begin <= layer < end for layer in layers) and list(layers) == sorted(layers)
    if count > 1:
        gaps = [other - one for one, other in itertools.pairwise(layers)]
        assert max(gaps) - min(gaps) <= 1


def loads(count: int, places: int, groups: int) -> int:
    """From empty places: what lies there at the turn and at the end of a group need not come again."""
    held = min(places, count)
    return (2 * count - held) + (groups - 1) * (2 * count - 2 * held)


@pytest.mark.parametrize(("count", "places", "groups"), itertools.product([1, 2, 3, 8, 23], [1, 2, 3], [1, 2, 5]))
def test_loads_are_the_formula(count: int, places: int, groups: int) -> None:
    layers, book = streaming.streamed(0, 30, count), PlaceBook(places)
    whole = [layer for _ in range(groups) for layer in (*layers, *reversed(layers))]
    for number, layer in enumerate(whole):
        if book.place_of(layer) is None:
            book.taken_for(layer, whole[number + 1 :])
        book.next_load(layer, whole[number + 1 :])
    assert book.loads == loads(count, places, groups)


def test_a_layer_that_is_needed_sooner_stays() -> None:
    book = PlaceBook(2)
    book.taken_for(1, [2, 3])
    assert book.next_load(1, [2, 3]) == (2, 1)
    assert book.next_load(2, [3, 3, 2, 1]) == (3, 0), "layer 1 is needed last"
    assert book.next_load(3, [3, 2, 1]) is None, "layers 3 and 2 are needed before layer 1"
    assert book.next_load(2, [1]) == (1, 0), "layer 3 is not needed any more"
