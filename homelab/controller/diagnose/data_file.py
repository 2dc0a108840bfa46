"""The text files of this room: topics, rules and endings are TOML beside the code, part of the package."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.torch_builds import BEFORE_TURING, FROM_TURING, TORCH
from homelab.controller.config.file_faults import Fault, raise_faults
from homelab.controller.facts.node_commands import RESTART_OF_CARD_IN_WORDS

_VALUES = {
    "TORCH": TORCH,
    "RESTART_OF_CARD": RESTART_OF_CARD_IN_WORDS,
    **{f"FROM_TURING.{key}": str(getattr(FROM_TURING, key)) for key in ("cuda", "driver", "index", "tag")},
    **{f"BEFORE_TURING.{key}": str(getattr(BEFORE_TURING, key)) for key in ("cuda", "driver", "index", "tag")},
}
_NAME = re.compile(r"\{(" + "|".join(re.escape(name) for name in _VALUES) + r")\}")
Made = TypeVar("Made")


def load(name: str) -> dict[str, Any]:
    """The TOML document homelab/controller/diagnose/NAME, with the values of `_VALUES` put in: {TORCH}, {RESTART_OF_CARD}, {FROM_TURING.cuda}, ...

    Raises InputError with the file and the line where it is not valid TOML.
    """
    try:
        return tomllib.loads(_NAME.sub(lambda match: _VALUES[match[1]], _text(name)))
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"this file is not valid TOML: {error}", where=str(_path(name)), hint="correct that line; patterns stand in single quotes"
        ) from error


def each(
    name: str, section: str, make: Callable[[dict[str, Any]], Made], keys: Collection[str], needed: Collection[str]
) -> tuple[Made, ...]:
    """What `make` makes of each table of a section. Raises InputError with the file, and with the line of each unknown, missing or unusable key."""
    made: list[Made] = []
    faults: list[Fault] = []
    for number, entry in enumerate(load(name)[section]):
        wrong: list[Fault] = [
            ((section, number, key), f'unknown key "{key}".{did_you_mean(key, keys)}') for key in entry if key not in keys
        ]
        wrong += [((section, number), f'"{key}" is missing') for key in needed if key not in entry]
        try:
            made += [make(entry)] if not wrong else []
        except (TypeError, AttributeError, re.error) as error:
            wrong = [((section, number), f"{entry.get('id')} cannot be used: {error}")]
        faults += wrong
    raise_faults(_path(name), _text(name), faults)
    return tuple(made)


def _path(name: str) -> Path:
    return Path(__file__).parent / name


def _text(name: str) -> str:
    data = pkgutil.get_data(__package__, name)
    assert data is not None, name
    return data.decode()
