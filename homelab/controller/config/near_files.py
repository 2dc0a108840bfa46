"""A file that is not where it was typed: those that may be meant, from its folder and from recipes/."""

from __future__ import annotations

import difflib
import os
import shlex
from itertools import islice
from pathlib import Path

from homelab.controller.base.hint import Hint

_HOME = Path("recipes")  # the recipes that homelab ships, and where most people keep theirs
_MOST_FILES, _MOST_NAMED = 500, 3
_NEAR = 0.6  # of difflib: a letter or two of a short name


def near(path: Path) -> list[Path]:
    """The TOML files whose names are nearest to that of `path`, the nearest first, as a person would type them."""
    files = dict.fromkeys(file for folder in (path.parent, path.parent / _HOME, _HOME, *_below(_HOME)) for file in _files(folder))
    by_place: dict[str, Path] = {}
    for file in files:
        by_place.setdefault(os.path.realpath(file), file)
    wanted = path.stem.lower()

    def likeness(file: Path) -> float:
        return difflib.SequenceMatcher(None, wanted, file.stem.lower()).ratio()

    return sorted((file for file in by_place.values() if likeness(file) >= _NEAR), key=lambda file: (-likeness(file), str(file)))[
        :_MOST_NAMED
    ]


def hint(path: Path, otherwise: str) -> str:
    """`did you mean` with those files, and `otherwise` behind it."""
    names = [shlex.quote(str(file)) for file in near(path)]
    return Hint("did you mean {}? Otherwise: {}", " or ".join(names), otherwise) if names else otherwise


def _files(folder: Path) -> list[Path]:
    """The TOML files of a folder; none where it cannot be read."""
    try:
        return [file for file in islice(folder.iterdir(), _MOST_FILES) if file.suffix == ".toml" and file.is_file()]
    except OSError:
        return []


def _below(folder: Path) -> list[Path]:
    try:
        return [entry for entry in islice(folder.iterdir(), _MOST_FILES) if entry.is_dir()]
    except OSError:
        return []
