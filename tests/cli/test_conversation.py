"""Answers of `homelab chat` break between words, however the pieces of the model are cut."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from homelab.cli.conversation import WrappedWords


def shown(pieces: list[str], columns: int | None) -> str:
    said: list[str] = []
    words = WrappedWords(said.append, columns)
    for piece in pieces:
        words.add(piece)
    words.end()
    return "".join(said)


@given(
    text=st.text(st.sampled_from("ab \n\u6211\t"), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=8), columns=st.integers(4, 20)
)
def test_no_word_is_broken_and_none_is_lost(text: str, cuts: list[int], columns: int) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    answer = shown(pieces, columns)
    assert answer.split() == text.split()
    for line in answer.split("\n"):
        assert cell_len(line.expandtabs(1)) <= columns or len(line.split()) == 1, line
    assert answer.count("\n") >= text.count("\n")


def test_a_line_is_broken_at_the_width_and_not_before() -> None:
    assert shown(["one tw", "o three", " four"], 8) == "one two\nthree\nfour\n"
    assert shown(["one two"], 7) == "one two\n"


def test_without_a_terminal_pieces_pass_as_they_come() -> None:
    pieces = ["a ", " b\n", "c" * 300]
    assert shown(pieces, None) == "".join(pieces) + "\n"
    assert not re.search(r"\n.*\n.*\n.*\n", shown(pieces, None))
