"""What `recover` says of checkpoints that it does not use, and whose copy it takes where nodes hold different ones."""

from __future__ import annotations

import pytest

from homelab.controller.features.recover.replicas import choose, unused

pytestmark = pytest.mark.timeout(10)

OLD = {"trainable.safetensors": "a1", "optimizer.pt": "a2", "curves.jsonl": "x"}
NEW = {"trainable.safetensors": "b1", "optimizer.pt": "b2", "curves.jsonl": "y"}


def test_copies_that_agree_are_no_news() -> None:
    found = choose(540, {"node1": OLD, "node2": OLD | {"curves.jsonl": "other"}})
    assert found.holders == ["node1", "node2"] and found.notes == () and found.digest
    assert found.files == {"trainable.safetensors": "a1", "optimizer.pt": "a2"}


@pytest.mark.parametrize("odd", ["node1", "node2", "node3"])
def test_one_that_differs_receives_what_most_hold(odd: str) -> None:
    nodes = {name: NEW if name == odd else OLD for name in ("node1", "node2", "node3")}
    found = choose(540, nodes)
    assert odd not in found.holders and len(found.holders) == 2 and found.files["optimizer.pt"] == "a2"
    (note,) = found.notes
    assert note.startswith(f"checkpoint 540 on {odd} has other weights") and f"{odd} receives theirs (most hold this one)" in note


def test_an_optimizer_that_differs_is_a_copy_that_differs() -> None:
    assert choose(540, {"node1": OLD, "node2": OLD, "node3": OLD | {"optimizer.pt": "c2"}}).holders == ["node1", "node2"]


def test_of_two_the_heads_is_taken_and_said_to_be_no_majority() -> None:
    found = choose(540, {"node1": OLD, "node2": NEW})
    assert found.holders == ["node1"] and "node2 receives that of node1 (each copy is on the same number of nodes" in found.notes[0]


def test_a_node_of_an_older_homelab_says_no_digests_and_is_a_holder_all_the_same() -> None:
    found = choose(540, {"node1": {}, "node2": {}})
    assert (found.holders, found.digest, found.files, found.notes) == (["node1", "node2"], "", {}, ())


def test_newer_checkpoints_that_are_damaged_are_told_once_for_all_nodes() -> None:
    why = "optimizer.pt has changed since it was saved"
    bad = {"node1": {"540": why, "530": why}, "node2": {"540": why, "530": "no manifest", "510": why}, "node3": {}}
    assert set(unused(520, bad)) == {
        f"checkpoint 540 on node1, node2 is not used: {why}",
        f"checkpoint 530 on node1 is not used: {why}",
        "checkpoint 530 on node2 is not used: no manifest",
    }
    assert unused(520, {}) == ()
