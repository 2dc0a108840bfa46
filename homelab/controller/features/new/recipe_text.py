"""The text of a recipe that `homelab new` writes: each value with its reason behind it, and what a person has edited since. Pure.

The last line records what was decided. A key whose value is another one now was edited by a person: it is kept, with its comment.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError
from tomlkit.items import Item, Table

from homelab.controller.base.errors import InputError
from homelab.controller.base.sanitize import plain
from homelab.controller.features.new.decisions import Decision

_SECTIONS = ("model", "data", "objective", "method", "train", "parallel", "checkpoint", "tracking")
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
        lines += ["", f"[{section}]", *(f"{_line(one):<{_width(decisions, section)}}  # {_reason(one)}" for one in own)]
    return RecipeText("\n".join([*lines, "", _record({one.place: one.value for one in decisions})]) + "\n")


def edits(text: str, where: str) -> dict[str, Any]:
    """Place (section.key) -> value of what a person has changed or added since; None for a key that they took out. Raises InputError as `again`."""
    before, now = _recorded(text, where), standing(text, where)
    return {place: now.get(place) for place in {**before, **now} if place not in before or now.get(place) != before[place]}


def standing(text: str, where: str) -> dict[str, Any]:
    """Place -> value of every key that is there. Raises InputError where it is no TOML."""
    sections = _parsed(text, where).unwrap().items()
    return {f"{name}.{key}": value for name, section in sections if isinstance(section, dict) for key, value in section.items()}


def again(text: str, head: Sequence[str], decisions: Sequence[Decision], where: str) -> RecipeText:
    """The text of a file that is there, with the new decisions in the places that nobody has edited. Raises InputError for a file that
    `homelab new` has not written."""
    before, edited, document = _recorded(text, where), edits(text, where), _parsed(text, where)
    kept, record = [], {}
    for one in decisions:
        section = document.get(one.section)
        if not isinstance(section, Table):
            section = tomlkit.table()
            document.append(one.section, section)
        is_theirs = one.place in edited
        if one.place in before or not is_theirs:
            record[one.place] = before[one.place] if is_theirs else one.value  # an edit stays one, also if homelab comes to the same value
        if is_theirs:
            if section.get(one.key) != one.value:
                kept.append(one)
            continue
        value = _item(one)
        value.comment(_reason(one))
        value.trivia.comment_ws = " " * (2 + max(0, _width(decisions, one.section) - len(_line(one))))
        section[one.key] = value
    emptied = set()  # an empty [objective] would still ask for one
    for place in before.keys() - {one.place for one in decisions} - edited.keys():
        name, _, key = place.partition(".")
        section = document.get(name)
        if isinstance(section, Table):
            section.remove(key)
            emptied |= set() if section else {f"[{name}]"}
    lines = [line for line in document.as_string().splitlines() if not line.startswith(_RECORD)]
    for number in reversed([number for number, line in enumerate(lines) if line.partition("#")[0].strip() in emptied]):
        del lines[number - 1 if number and not lines[number - 1] else number : number + 1]  # comments of a person below it stay
    old_head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    if old_head and old_head[0].startswith(HEAD):
        lines = [*_comment(head), *lines[len(old_head) :]]
    return RecipeText("\n".join([*lines, _record(record)]) + "\n", tuple(kept))


def _comment(sentences: Sequence[str]) -> list[str]:
    return [f"# {line}" for sentence in sentences for line in textwrap.wrap(plain(sentence), _WIDTH)]


def _reason(one: Decision) -> str:
    """The reason as a comment: in one line of harmless characters, because names of columns and cards come from a file or a node."""
    return " ".join(plain(one.reason).split())


def _parsed(text: str, where: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except ParseError as error:
        hint = "correct the line; or write another file: --output FILE"
        raise InputError(f"this recipe is not valid TOML: {error}", where=where, hint=hint) from error


def _width(decisions: Sequence[Decision], section: str) -> int:
    """Columns of the keys and values of a section, before their reasons."""
    return min(_MOST_WIDE, max(len(_line(one)) for one in decisions if one.section == section))


def _line(one: Decision) -> str:
    return f"{one.key} = {_item(one).as_string()}"


def _item(one: Decision) -> Item:
    """The value in one line."""
    if not isinstance(one.value, dict):
        return tomlkit.item(one.value)
    table = tomlkit.inline_table()
    table.update(one.value)
    return table


def _record(decided: Mapping[str, Any]) -> str:
    return _RECORD + json.dumps(decided)


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
