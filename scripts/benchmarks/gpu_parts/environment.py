"""The environment of a benchmark's processes."""

from __future__ import annotations

import os
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[3]


def python_path() -> str:
    """PYTHONPATH: this repository, then what was there before. Packages may be carried by it (`pip install --target`)."""
    return os.pathsep.join(filter(None, (str(_REPOSITORY / "scripts"), str(_REPOSITORY), os.environ.get("PYTHONPATH"))))


def first_card() -> str:
    """CUDA_VISIBLE_DEVICES with one card only: beside a second one the Trainer of a single rank would spread its rows over both."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
