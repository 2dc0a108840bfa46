"""The one rule of checkpoints and their holders, with cases for both layouts. No strategy saves shards yet: these cases are its contract."""

from __future__ import annotations

import pytest

from homelab.shared.protocol.checkpoint_holders import (
    REPLICATED,
    SHARDED,
    WHOLE,
    Copy,
    Holding,
    choose,
    copies,
    holding,
    indispensable,
    layout_of,
    missing,
)

pytestmark = pytest.mark.timeout(10)


def shards(of: int, *parts: int) -> Holding:
    return Holding(frozenset(parts), of)


def buddies(*names: str) -> dict[str, Holding]:
    """One rank on each node; each node also holds the shard of the node before it."""
    return {name: shards(len(names), number, (number - 1) % len(names)) for number, name in enumerate(names)}


def test_a_plan_of_an_older_folder_is_replicated() -> None:
    assert layout_of({}) == REPLICATED
    assert layout_of({"checkpoint_layout": SHARDED}) == SHARDED


@pytest.mark.parametrize(
    ("layout", "named", "worth"),
    [
        (REPLICATED, None, WHOLE),
        (SHARDED, None, None),
        (SHARDED, {"of": 4, "held": [0, 1]}, shards(4, 0, 1)),
        (REPLICATED, {"of": 4, "held": [0, 1]}, shards(4, 0, 1)),  # an earlier attempt saved it
    ],
)
def test_what_a_folder_is_worth(layout: str, named: dict[str, object] | None, worth: Holding | None) -> None:
    assert holding(layout, named) == worth


def test_of_replicated_ones_the_newest_of_any_node_is_chosen() -> None:
    found = choose({20: {"b": WHOLE}, 10: {"a": WHOLE, "c": WHOLE}})
    assert (found.step, list(found.held), found.incomplete) == (20, ["b"], {})


def test_nothing_held_is_no_checkpoint() -> None:
    assert choose({}).step == 0


def test_shards_are_a_checkpoint_when_all_are_there() -> None:
    found = choose({20: {"a": shards(3, 0), "b": shards(3, 1, 2)}})
    assert (found.step, list(found.held)) == (20, ["a", "b"])


def test_one_shard_that_is_missing_makes_an_older_one_the_newest_and_is_named() -> None:
    found = choose({30: {"a": shards(3, 0), "c": shards(3, 2)}, 20: {"a": shards(3, 0, 1), "c": shards(3, 2)}})
    assert found.step == 20
    assert found.incomplete == {30: (1,)}


def test_a_buddy_replaces_one_node_that_is_silent_and_not_two() -> None:
    of_all = buddies("a", "b", "c")
    assert choose({20: {name: its for name, its in of_all.items() if name != "b"}}).step == 20
    alone = choose({20: {"a": of_all["a"]}})
    assert (alone.step, alone.incomplete) == (0, {20: (1,)})


def test_shards_of_two_divisions_do_not_fit_together() -> None:
    found = choose({20: {"a": shards(2, 0), "b": shards(3, 1, 2)}})
    assert (found.step, found.incomplete) == (0, {20: (0,)})
    assert choose({20: {"a": shards(2, 0, 1), "b": shards(3, 1, 2)}}).held == {"a": shards(2, 0, 1)}


def test_missing() -> None:
    assert missing({"a": WHOLE}) == ()
    assert missing({"a": shards(4, 0, 2)}) == (1, 3)


@pytest.mark.parametrize(
    ("holders", "team", "to_all", "moves"),
    [
        (["b"], ["a", "b", "c"], False, []),
        (["c"], ["a", "b"], False, [("c", "a")]),
        (["b"], ["a", "b", "c"], True, [("b", "a"), ("b", "c")]),
        (["c", "d"], ["a", "b"], True, [("c", "a"), ("c", "b")]),
        (["a", "b"], ["a", "b"], True, []),
    ],
)
def test_of_a_replicated_one_the_first_that_lacks_it_receives_it(
    holders: list[str], team: list[str], to_all: bool, moves: list[tuple[str, str]]
) -> None:
    assert [(copy.source, copy.target) for copy in copies(dict.fromkeys(holders, WHOLE), team, to_all=to_all)] == moves


def test_shards_of_a_node_outside_of_the_plan_are_brought_and_no_others() -> None:
    held = {"a": shards(4, 0), "b": shards(4, 1), "c": shards(4, 2, 3)}
    assert copies(held, ["a", "b", "c"], to_all=False) == ()
    assert copies(held, ["a", "b"], to_all=False) == (Copy(2, "c", "a"), Copy(3, "c", "b"))


def test_a_buddys_copy_needs_no_move() -> None:
    assert copies(buddies("a", "b", "c"), ["a", "c"], to_all=False) == ()


def test_who_holds_the_only_copy_cannot_be_left_out() -> None:
    held = {"a": shards(3, 0, 1), "b": shards(3, 1), "c": shards(3, 2)}
    assert indispensable(held, list("abc")) == {"a": (0,), "c": (2,)}
    assert indispensable(buddies("a", "b", "c"), list("abc")) == {}
    assert indispensable(buddies("a", "b", "c"), ["a", "b"]) == {"a": (2,), "b": (1,)}
    assert indispensable({"a": shards(2, 0, 1)}, ["a"]) == {"a": (0, 1)}
    assert indispensable({"a": WHOLE}, ["a"]) == {}
