"""The data set of the demo, and every file a user starts from: what the recipes and the README rely on."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from homelab.controller.config.load import load_cluster, load_recipe
from tests import builders

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "recipes" / "data" / "homelab-qa.jsonl"
HELD_OUT = ROOT / "recipes" / "data" / "homelab-qa-heldout.jsonl"
# What the demo trains on: few facts, so that 80 steps teach them for good.
DEMO, DEMO_HELD_OUT = (ROOT / "recipes" / "data" / name for name in ("demo.jsonl", "demo-heldout.jsonl"))

# The facts that the demo asks for before and after training, each by some words of its answer.
FLAGSHIPS = (
    "one trainer for language models",
    "a recipe alone decides",
    "`homelab recover`",
    "hosts node rank 0",
    "samples of every global batch",
)


def pairs(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of every line; fails on a line of any other shape."""
    result = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert set(record) == {"messages"}, line
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"], line
        assert all(set(message) == {"role", "content"} for message in record["messages"]), line
        question, answer = (message["content"] for message in record["messages"])
        assert question == question.strip() and answer == answer.strip(), line
        result.append((question, answer))
    return result


def words(question: str) -> tuple[str, ...]:
    """A question without case and punctuation: two that differ only there are one question."""
    return tuple(re.findall(r"[\w.-]+", question.lower().replace(".", " ").replace("-", " ")))


@pytest.mark.parametrize(("path", "least"), [(TRAIN, 220), (HELD_OUT, 44)], ids=["train", "held-out"])
def test_enough_pairs_and_each_question_once(path: Path, least: int) -> None:
    questions = [words(question) for question, _ in pairs(path)]
    assert len(questions) >= least
    assert [question for question, count in Counter(questions).items() if count > 1] == []


def test_no_held_out_question_is_trained_on() -> None:
    trained = {words(question) for question, _ in pairs(TRAIN)}
    assert [question for question, _ in pairs(HELD_OUT) if words(question) in trained] == []


def test_held_out_questions_ask_for_facts_that_are_taught_in_several_wordings() -> None:
    taught = Counter(answer for _, answer in pairs(TRAIN))
    for question, answer in pairs(HELD_OUT):
        assert taught[answer] >= 2, f"{question!r} is answered by {taught[answer]} training questions only"


@pytest.mark.parametrize(("part", "whole"), [(DEMO, TRAIN), (DEMO_HELD_OUT, HELD_OUT)], ids=["train", "held-out"])
def test_the_demo_has_the_facts_that_are_taught_most(part: Path, whole: Path) -> None:
    often = {answer for answer, count in Counter(answer for _, answer in pairs(TRAIN)).items() if count >= 4}
    assert pairs(part) == [pair for pair in pairs(whole) if pair[1] in often] and len(often) == 12


def test_the_demo_asks_for_what_it_teaches() -> None:
    script = (ROOT / "scripts" / "demo").read_text(encoding="utf-8")
    questions, expected = (
        re.findall(r'"([^"]+)"', re.findall(rf"^{name}=\((.*)\)$", script, re.MULTILINE)[0]) for name in ("questions", "expected")
    )
    assert len(questions) == len(expected) > 1
    answers = [answer for _, answer in pairs(DEMO)]
    assert all(any(words_of in answer for answer in answers) for words_of in expected)
    steps = load_recipe(ROOT / "recipes" / "demo.toml").train
    assert steps is not None and steps.steps is not None and steps.steps * steps.global_batch >= 8 * len(answers), (
        "each fact is seen often enough"
    )


@pytest.mark.parametrize("fact", FLAGSHIPS)
def test_flagship_facts_are_taught_often_and_held_out_twice(fact: str) -> None:
    assert sum(fact in answer for _, answer in pairs(TRAIN)) >= 4
    assert sum(fact in answer for _, answer in pairs(HELD_OUT)) >= 2


@pytest.mark.parametrize("path", [TRAIN, HELD_OUT], ids=["train", "held-out"])
def test_lengths_fit_a_small_model_and_the_recipes(path: Path) -> None:
    # Four characters per token are typical of English here; the measured longest pair is 93 tokens of demo.toml's 128.
    for question, answer in pairs(path):
        assert 12 <= len(question) <= 120, question
        assert 30 <= len(answer) <= 160, answer
        assert answer.endswith("."), answer
        assert answer.count(". ") <= 1, f"more than two sentences: {answer}"


@pytest.mark.parametrize("path", builders.PROJECT_RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.data is not None
    for source in (recipe.data.train, recipe.data.eval):
        if source is not None and not source.startswith(("/", "~/", "hub:")):
            assert (path.parent / source).is_file(), f"{path.name} ships {source}, which is not there"


def test_the_five_recipes_are_there() -> None:
    names = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert names >= {"demo", "tinyllama-test", "llama7b-lora", "llama13b-qlora", "smollm3-3b-sft"}


def test_the_example_cluster_loads() -> None:
    cluster = load_cluster(ROOT / "cluster.toml")
    assert [(node.host, node.gpus[0].vram_gb) for node in cluster.nodes] == [
        ("192.168.1.100", 16),
        ("192.168.1.101", 8),
        ("192.168.1.102", 8),
    ]
