"""One recipe as several jobs: every combination of the values that `--set` names. Pure."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from homelab.controller.base.errors import InputError

MOST_JOBS = 100


@dataclass(frozen=True)
class Setting:
    """A key of the recipe and one value for it; `shown` is how it was typed."""

    key: str
    value: Any
    shown: str

    def __str__(self) -> str:
        return f"{self.key}={self.shown}"


def combinations(typed: Sequence[str]) -> list[tuple[Setting, ...]]:
    """One entry for each job; one without settings if nothing was typed. Raises InputError."""
    lists = [_settings(text) for text in typed]
    keys = [settings[0].key for settings in lists]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise InputError(f"{twice} is set twice", where=f"--set {twice}=...", hint=f"name all its values at once: --set {twice}=1,2")
    found = list(itertools.product(*lists))
    if len(found) > MOST_JOBS:
        raise InputError(
            f"these are {len(found)} jobs; a sweep has {MOST_JOBS} at most", where=" ".join(f"--set {text}" for text in typed), hint="name fewer values"
        )  # fmt: skip
    return found


def _settings(typed: str) -> list[Setting]:
    key, sign, text = typed.partition("=")
    where = f"--set {typed}"
    if not sign or re.fullmatch(r"\w+(\.\w+)+", key.strip(), re.ASCII) is None:
        raise InputError(
            "--set names a key of the recipe and its values", where=where, hint="write it like this: --set train.learning_rate=1e-4,2e-4"
        )
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError("a value is empty", where=where, hint=f"write a value behind = and behind each comma: --set {key}=1,2")
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
        shown = parts if len(parts) == len(values) else [tomlkit.item(value).as_string() for value in values]
    except (ValueError, RecursionError):
        values, shown = [_value(part) for part in parts], parts
    return [Setting(key.strip(), value, word) for value, word in zip(values, shown, strict=True)]


def _value(text: str) -> Any:
    """As TOML has it; a word without quotes is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def applied(text: str, settings: Sequence[Setting]) -> str:
    """The recipe's text with these values; all else stays as it was written. Raises InputError for a key that lies in no section."""
    if not settings:
        return text
    document = tomlkit.parse(text)
    for setting in settings:
        table: Any = document
        *sections, key = setting.key.split(".")
        try:
            for section in sections:
                table = table.setdefault(section, tomlkit.table())
            table[key] = setting.value
        except (AttributeError, TypeError, TOMLKitError) as error:
            raise InputError(
                f"{setting.key} is no key of a section", where=f"--set {setting}", hint="homelab explain recipe lists the keys"
            ) from error
    return tomlkit.dumps(document)
