"""The reference of cluster.toml, recipes and suites: one commented TOML file for each section, in homelab/docs/reference.

A file is at once an example, the page of `homelab explain recipe.train`, and the source of the descriptions in the JSON Schema. It begins with the
description of the section. Each key follows behind its own comment: with its default, or as `#key = example` where it is left out by default.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import tomllib
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r"^(#?)([a-zA-Z_]+) = (.*)$")
# The files in the order of their sections; `suite` is one table without sections.
SECTIONS = {
    "recipe": ("model", "data", "method", "train", "objective", "script", "parallel", "checkpoint", "recovery", "tracking", "environment"),
    "cluster": ("cluster", "network", "energy", "notify", "nodes"),
    "suite": ("suite",),
}


@dataclass(frozen=True)
class Key:
    """One key: its description, the value that stands in the file (as TOML and as a value), and whether it is left out by default."""

    name: str
    description: str
    written: str
    value: Any
    is_left_out: bool


@dataclass(frozen=True)
class SectionPage:
    """One file of the reference."""

    name: str
    description: str
    keys: tuple[Key, ...]
    text: str


def names() -> tuple[str, ...]:
    """The names of all pages, like recipe.train."""
    return tuple(f"{kind}.{section}" if kind != section or kind == "cluster" else kind for kind in SECTIONS for section in SECTIONS[kind])


@functools.cache
def page(name: str) -> SectionPage:
    """The page of this name. Raises KeyError for one that is not in `names()`."""
    if name not in names():
        raise KeyError(name)
    file = name if "." in name else f"{name}.{name}"
    text = (pkgutil.get_data("homelab", f"docs/reference/{file}.toml") or b"").decode()
    first, *paragraphs = text.strip().split("\n\n")
    return SectionPage(name, _prose(first.splitlines()), tuple(map(_key, paragraphs)), text)


def _key(paragraph: str) -> Key:
    *comment, line = paragraph.splitlines()
    found = _KEY.match(line)
    assert found is not None, f"no key behind its comment: {line}"
    return Key(found[2], _prose(comment), found[3], tomllib.loads(f"value = {found[3]}")["value"], bool(found[1]))


def _prose(comment: list[str]) -> str:
    return " ".join(line.removeprefix("#").strip() for line in comment)
