"""The file that `homelab new` writes, and writes again."""

from __future__ import annotations

import tomllib

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.features.new import recipe_text
from homelab.controller.features.new.decisions import Decision

HEAD = ["`homelab new` wrote this: a sentence."]


def decided(rate: float = 1e-3, *more: Decision) -> tuple[Decision, ...]:
    return (
        Decision("model", "name", 'a/"b', "as you asked"), Decision("train", "learning_rate", rate, f"the rate {rate}"),
        Decision("train", "keep_best", True, "why not"), *more,
    )  # fmt: skip


def test_each_value_stands_with_its_reason() -> None:
    text = recipe_text.fresh(HEAD, decided()).text
    assert tomllib.loads(text) == {"model": {"name": 'a/"b'}, "train": {"learning_rate": 0.001, "keep_best": True}}
    assert "learning_rate = 0.001  # the rate 0.001\nkeep_best = true       # why not" in text


def test_nothing_changes_without_a_new_decision() -> None:
    text = recipe_text.fresh(HEAD, decided()).text
    assert recipe_text.again(text, HEAD, decided(), "r.toml") == recipe_text.RecipeText(text)


def test_what_nobody_has_edited_follows_the_decision() -> None:
    text = recipe_text.again(recipe_text.fresh(HEAD, decided()).text, ["`homelab new` wrote this: another."], decided(2e-3), "r.toml")
    assert text == recipe_text.fresh(["`homelab new` wrote this: another."], decided(2e-3))


def test_an_edit_stays_with_its_comment_and_so_does_what_was_added() -> None:
    text = recipe_text.fresh(HEAD, decided()).text
    edited = text.replace(
        "learning_rate = 0.001  # the rate 0.001", "# mine\nlearning_rate = 5e-4 # slow\nseed = 7\n\n[recovery]\nauto = false\n\n[train]", 1
    )
    edited = edited.replace("\n\n[train]\nkeep_best = true       # why not", "", 1)
    again = recipe_text.again(edited, HEAD, decided(2e-3), "r.toml")
    assert "# mine\nlearning_rate = 5e-4 # slow\nseed = 7" in again.text and "auto = false" in again.text
    assert [one.place for one in again.kept] == ["train.learning_rate", "train.keep_best"]  # the second was taken out
    twice = recipe_text.again(again.text, HEAD, decided(2e-3), "r.toml")
    assert "learning_rate = 5e-4 # slow" in twice.text


def test_a_key_that_is_no_longer_decided_goes_unless_it_was_edited() -> None:
    cut = Decision("data", "eval_fraction", 0.1, "some")
    text = recipe_text.fresh(HEAD, decided(1e-3, cut)).text
    assert "eval_fraction" not in recipe_text.again(text, HEAD, decided(), "r.toml").text.partition("# Decided")[0]
    edited = text.replace("eval_fraction = 0.1", "eval_fraction = 0.2", 1)
    assert "eval_fraction = 0.2" in recipe_text.again(edited, HEAD, decided(), "r.toml").text


def test_a_section_goes_with_its_last_key_and_leaves_the_comments_of_a_person() -> None:
    """An [objective] without a kind is refused."""
    pairs = (Decision("objective", "kind", "dpo", "rows are pairs"), Decision("objective", "beta", 0.1, "as published"))
    text = recipe_text.fresh(HEAD, decided(1e-3, *pairs)).text
    assert recipe_text.again(text, HEAD, decided(), "r.toml") == recipe_text.fresh(HEAD, decided())
    commented = text.replace("\n[train]", "\n# mine\n[train]").replace("[objective]", "[objective]  # what is better")
    again = recipe_text.again(commented, HEAD, decided(), "r.toml").text
    assert tomllib.loads(again).keys() == {"model", "train"} and "# mine\n[train]" in again
    edited = text.replace("beta = 0.1", "beta = 0.3")
    assert tomllib.loads(recipe_text.again(edited, HEAD, decided(), "r.toml").text)["objective"] == {"beta": 0.3}


@pytest.mark.parametrize("text", ["", "[model]\nname = 'x'\n", "# Decided: {\n", "# Decided: 3\n"])
def test_a_file_of_somebody_else_is_left_alone(text: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_text.again(text, HEAD, decided(), "r.toml")
    assert caught.value.where == "r.toml" and "--output" in str(caught.value.hint)


def test_a_file_that_is_no_toml_any_more_is_refused_with_its_line() -> None:
    text = recipe_text.fresh(HEAD, decided()).text.replace("learning_rate = 0.001", "learning_rate 0.001")
    with pytest.raises(InputError):
        recipe_text.again(text, HEAD, decided(2e-3), "r.toml")


def test_an_edit_stays_one_though_homelab_once_came_to_the_same_value() -> None:
    edited = recipe_text.fresh(HEAD, decided(1e-3)).text.replace("learning_rate = 0.001 ", "learning_rate = 0.002 ", 1)
    same = recipe_text.again(edited, HEAD, decided(2e-3), "r.toml")
    assert same.kept == ()
    later = recipe_text.again(same.text, HEAD, decided(3e-3), "r.toml")
    assert "learning_rate = 0.002" in later.text and [one.place for one in later.kept] == ["train.learning_rate"]
    assert recipe_text.edits(later.text, "r.toml") == {"train.learning_rate": 0.002}


@pytest.mark.parametrize("words", ['a\n[script]\npath = "evil.py"', "a\r\nseed = 1", "a\x00\x1b[2Jb", "\u2028seed = 1"])
def test_a_reason_is_one_line_whatever_a_file_or_a_node_says(words: str) -> None:
    odd = Decision("data", "train", "x.jsonl", f"read as {words}")
    again = recipe_text.again(recipe_text.fresh(HEAD, decided()).text, HEAD, (*decided(), odd), "r.toml").text
    for text in (recipe_text.fresh([f"`homelab new` wrote this: {words}"], (odd,)).text, again):
        found = tomllib.loads(text)
        assert found["data"] == {"train": "x.jsonl"} and found.keys() <= {"data", "model", "train"} and "seed" not in found.get("train", {})
