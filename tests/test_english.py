"""README and guide are read in one pass: a README of one page, short sentences, and subjects that name a thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import english

pytestmark = pytest.mark.timeout(20)


def test_the_readme_is_one_page() -> None:
    assert len((english.REPOSITORY / "README.md").read_text(encoding="utf-8").split()) <= english.README_WORDS


@pytest.mark.parametrize("page", (*english.PAGES, *english.FOR_CONTRIBUTORS), ids=lambda page: str(page.relative_to(english.REPOSITORY)))
def test_sentences_are_short_and_name_their_subject(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert english.too_long(text) + english.vague(text) == []
    assert english.mean(text) < english.MEAN_WORDS


LONG = (
    "The first steps get four times the time that the plan expects and five minutes, and a node without power or network is noticed in about "
    "five seconds while the others report that they cannot reach it."
)


@pytest.mark.parametrize(
    "sentence",
    [
        "What is left is kept.", "It ends. What the ranks print is in the log.", "That a node is off ends nothing.", "One that waits writes nothing.",
        "One of them is enough.", "- first\n- Whatever it was, it is gone.", "| key | what is kept when it ends |\n|---|---|",
    ],
)  # fmt: skip
def test_a_vague_subject_is_seen(sentence: str) -> None:
    assert len(english.vague(sentence)) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "What is the law?",
        "One node trains.",
        "That build has no kernels.",
        "It ends that a node is off.",
        "Those that fail stop."[6:],
        "`one` is a word.",
        "    What is code",
    ],
)
def test_a_clear_subject_is_not(sentence: str) -> None:
    assert english.vague(sentence) == []


def test_a_long_sentence_is_seen_wherever_it_stands() -> None:
    for text in (LONG, f"Short. {LONG}", f"- item\n- {LONG}", f"| a | {LONG} |", f"```sh\n{LONG}\n```\n{LONG}", f"1. {LONG}\n2. second"):
        assert len(english.too_long(text)) == 1, text
    for text in (f"```sh\n{LONG}\n```", f"    {LONG}", f"`{LONG}`", LONG.replace("minutes, and", "minutes. And"), f"<!-- {LONG} -->"):
        assert english.too_long(text) == [], text
