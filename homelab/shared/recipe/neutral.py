"""Keys of a recipe that joined it after others had trained, with the value that means the same as their absence. Pure.

A new key of [model], [data], [method], [train] or [objective] stands here: older runs keep their fingerprint, and their run.json may lack the key.
"""

from __future__ import annotations

from typing import Any

NEUTRAL: dict[str, dict[str, Any]] = {
    "model": {"adapter": None},
    "method": {"base": "auto", "model_dropout": False},
    "data": {"columns": None},
    "objective": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
}
