"""The text of a recipe that `homelab new` writes: each value with its reason behind it, and what a person has edited since. Pure.

The last line records what was decided. A key whose value is another one now was edited by a person: it is kept, with its comment.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError
from tomlkit.items import Table

from homelab.controller.base.errors import InputError
from homelab.controller.features.new.decisions import Decision

_SECTIONS = ("model", "data", "method", "train", "parallel", "checkpoint", "tracking")
_RECORD = "# Decided: "
HEAD = "# `homelab new` wrote this"
_WIDTH, _MOST_WIDE = 100, 40


@dataclass(frozen=True)
class RecipeText:
    """`text` is the file. `kept`: places (section.key) that a person has edited, with the value that homelab would take."""

    text: str
    kept: tuple[Decision, ...] = ()


def fresh(head: Sequence[str], decisions: Sequence[Decision]) -> RecipeText:
    """A new file. `head`: sentences that stand on top."""
    lines = _comment(head)
    for section in _SECTIONS:
        own = [one for one in decisions if one.section == section]
        if not own:
            continue
        lines += ["", f"[{section}]", *(f"{_line(one):<{_width(decisions, section)}}  # {one.reason}" for one in own)]
    return RecipeText("\n".join([*lines, "", _record(decisions)]) + "\n")


def again(text: str, head: Sequence[str], decisions: Sequence[Decision], where: str) -> RecipeText:
    """The text of a file that is there, with the new decisions in the places that nobody has edited. Raises InputError for a file that
    `homelab new` has not written."""
    before = _recorded(text, where)
    try:
        document = tomlkit.parse(text)
    except ParseError as error:
        hint = "correct the line; or write another file: --output FILE"
        raise InputError(f"this recipe is not valid TOML: {error}", where=where, hint=hint) from error
    kept = []
    for one in decisions:
        section = document.get(one.section)
        if not isinstance(section, Table):
            section = tomlkit.table()
            document.append(one.section, section)
        is_edited = section.get(one.key) != before[one.place] if one.place in before else one.key in section
        if is_edited:
            if section.get(one.key) != one.value:
                kept.append(one)
            continue
        value = tomlkit.item(one.value)
        value.comment(one.reason)
        value.trivia.comment_ws = " " * (2 + max(0, _width(decisions, one.section) - len(_line(one))))
        section[one.key] = value
    for place in before.keys() - {one.place for one in decisions}:
        name, _, key = place.partition(".")
        section = document.get(name)
        if isinstance(section, Table) and section.get(key) == before[place]:
            section.remove(key)
    lines = [line for line in document.as_string().splitlines() if not line.startswith(_RECORD)]
    old_head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    if old_head and old_head[0].startswith(HEAD):
        lines = [*_comment(head), *lines[len(old_head) :]]
    return RecipeText("\n".join([*lines, _record(decisions)]) + "\n", tuple(kept))


def _comment(sentences: Sequence[str]) -> list[str]:
    return [f"# {line}" for sentence in sentences for line in textwrap.wrap(sentence, _WIDTH)]


def _width(decisions: Sequence[Decision], section: str) -> int:
    """Columns of the keys and values of a section, before their reasons."""
    return min(_MOST_WIDE, max(len(_line(one)) for one in decisions if one.section == section))


def _line(one: Decision) -> str:
    return f"{one.key} = {tomlkit.item(one.value).as_string()}"


def _record(decisions: Sequence[Decision]) -> str:
    return _RECORD + json.dumps({one.place: one.value for one in decisions})


def _recorded(text: str, where: str) -> dict[str, Any]:
    record = next((line for line in reversed(text.splitlines()) if line.startswith(_RECORD)), None)
    try:
        decided = json.loads(record.removeprefix(_RECORD)) if record else None
    except ValueError:
        decided = None
    if not isinstance(decided, dict):
        raise InputError(
            "this file is there already, and homelab new has not written it", where=where,
            hint="name another one with --output FILE",
        )  # fmt: skip
    return decided
