"""The nodes that `homelab new` proposes: those that the plan itself would advise, and the last line names them."""

from __future__ import annotations

import dataclasses
import re
from itertools import permutations
from pathlib import Path

import pytest

from homelab.controller.config.cluster import Cluster
from homelab.controller.features.new import new_recipe, training_choice
from homelab.controller.features.new.new_recipe import NewRecipe
from homelab.controller.features.new.training_choice import Wish
from homelab.controller.planning.alternatives import advised_nodes
from homelab.controller.planning.plan import make as make_plan
from tests import builders
from tests.controller.features.new.test_new_recipe import CLUSTERS, MODELS, assert_launched_as_planned, machine, no_say, write

SMALL, LARGE = MODELS[0], "Qwen/Qwen3-8B"
GBIT = 1e9 / 8
BIG, OLD = ("RTX 4090", 24.0), ("GTX 1660", 6.0)
TWO_OF_12 = Cluster(nodes=(machine("a", ("RTX 3060", 12.0)), machine("b", ("RTX 3060", 12.0))))
THREE_BIG = Cluster(nodes=(machine("a", BIG), machine("b", BIG), machine("c", BIG)))
BESIDE_AN_OLD_CARD = Cluster(nodes=(machine("tower", BIG), machine("old", OLD)))


def wires(cluster: Cluster, rate: float, **slow: float) -> dict[tuple[str, str], float]:
    """Bytes per second of all pairs; those of a node in `slow` at its own."""
    names = [node.name for node in cluster.nodes]
    return {pair: min([rate, *(slow[name] for name in pair if name in slow)]) for pair in permutations(names, 2)}


# name -> (machines, measured wires, nodes for the small model, for the large one)
CASES = {
    "two equal, 1 Gbit/s": (CLUSTERS["two equal cards"], {}, 1, 1),
    "two equal, 25 Gbit/s": (CLUSTERS["two equal cards"], wires(CLUSTERS["two equal cards"], 25 * GBIT), 1, 2),
    "three unequal": (CLUSTERS["three unequal cards"], {}, ["tower"], ["tower"]),
    "one wire much slower": (THREE_BIG, wires(THREE_BIG, 25 * GBIT, c=0.1 * GBIT), 1, ["a", "b"]),
    "processors": (Cluster(nodes=(machine("a"), machine("b"), machine("c"))), {}, 3, 3),
    "a processor beside a card": (Cluster(nodes=(machine("a", BIG), machine("attic"))), {}, ["a"], ["a"]),
    "one machine": (Cluster(nodes=(machine("a", BIG),)), {}, ["a"], ["a"]),
    "enough memory only together": (TWO_OF_12, {}, 1, ["a", "b"]),
    "a card without bf16": (BESIDE_AN_OLD_CARD, {}, ["tower"], ["tower"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> NewRecipe:
    """Rows that were looked at once."""
    folder = tmp_path_factory.mktemp("data")
    return new_recipe.make(Wish(str(write(folder, "chats")), SMALL, folder / "r.toml", offline=True), CLUSTERS["one small card"], no_say)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_on_the_nodes_that_the_plan_advises(name: str, looked: NewRecipe, tmp_path: Path) -> None:
    cluster, throughputs, *expected = CASES[name]
    for model, nodes in zip((SMALL, LARGE), expected, strict=True):
        wish = Wish("x.jsonl", model, tmp_path / "r.toml", offline=True)
        seen = new_recipe.with_model(looked.seen.on(cluster), model, wish)
        seen = dataclasses.replace(seen, inputs=dataclasses.replace(seen.inputs, throughputs=throughputs))
        chosen = training_choice.choose(wish, model, seen, looked.rows)
        assert chosen.plan is not None and chosen.fits
        used = [node.name for node in chosen.plan.nodes]
        assert (len(used) if isinstance(nodes, int) else used) == nodes, chosen.who
        assert_launched_as_planned(chosen, seen)
        if name == "enough memory only together" and model == LARGE:
            assert chosen.plan.strategy == "pipeline"


def test_the_batch_is_that_of_all_machines(looked: NewRecipe, tmp_path: Path) -> None:
    """Who is fast today does not decide it: the law."""
    many = Cluster(nodes=tuple(machine(f"n{number}", BIG) for number in range(12)))
    wish = Wish("x.jsonl", SMALL, tmp_path / "r.toml", offline=True)
    chosen = training_choice.choose(wish, SMALL, new_recipe.with_model(looked.seen.on(many), SMALL, wish), looked.rows)
    assert len(chosen.nodes) == 1 and chosen.recipe.train.global_batch == 12


def test_the_file_and_the_last_line_name_them(tmp_path: Path) -> None:
    wish = Wish(str(write(tmp_path, "chats")), LARGE, tmp_path / "r.toml", offline=True)
    made = new_recipe.make(wish, CLUSTERS["three unequal cards"], no_say)
    assert str(made.following) == "homelab launch RECIPE --nodes tower"
    assert re.fullmatch(r"tower, without laptop and old: alone it does \d+ tokens/s, as a pipeline all do \d+", made.chosen.who)
    head = " ".join(line.removeprefix("# ") for line in wish.output.read_text().splitlines() if line.startswith("# "))
    assert f"Decided for {made.chosen.who}." in head
    assert not new_recipe.make(wish, CLUSTERS["three unequal cards"], no_say).is_changed


def test_edits_find_their_nodes_anew(tmp_path: Path) -> None:
    """Rows that are too long for one card go to all; and a machine that the written precision leaves out stays out."""
    wish = Wish(str(write(tmp_path, "chats")), LARGE, tmp_path / "r.toml", offline=True)
    new_recipe.make(wish, CLUSTERS["three unequal cards"], no_say)
    wish.output.write_text(re.sub(r"(?m)^seq_len = \d+", "seq_len = 2048", wish.output.read_text()))
    made = new_recipe.make(wish, CLUSTERS["three unequal cards"], no_say)
    assert made.chosen.recipe.train.seq_len == 2048 and made.chosen.fits and made.following == "homelab launch RECIPE"

    other = dataclasses.replace(wish, output=tmp_path / "old.toml")
    assert new_recipe.make(other, BESIDE_AN_OLD_CARD, no_say).following == "homelab launch RECIPE --nodes tower"
    other.output.write_text(re.sub(r"(?m)^epochs = \d+", "epochs = 9", other.output.read_text()))
    made = new_recipe.make(other, BESIDE_AN_OLD_CARD, no_say)
    assert made.chosen.recipe.train.epochs == 9 and made.following == "homelab launch RECIPE --nodes tower"
    assert "GTX 1660 of old has none (before Ampere)" in made.chosen.who


def test_a_recipe_that_wants_more_nodes_keeps_them() -> None:
    recipe = builders.recipe(
        model={"name": LARGE}, method={"kind": "lora"}, train={"global_batch": 8, "learning_rate": 1e-4, "steps": 10, "seq_len": 256}
    )
    inputs = builders.plan_inputs(CLUSTERS["two equal cards"], recipe, {})
    assert len(advised_nodes.follow(inputs, make_plan).plan.nodes) == 1
    wants_two = recipe.model_copy(update={"recovery": dataclasses.replace(recipe.recovery, min_nodes=2)})
    advised = advised_nodes.follow(dataclasses.replace(inputs, recipe=wants_two), make_plan)
    assert len(advised.plan.nodes) == 2 and not advised.left_out and not advised.because
