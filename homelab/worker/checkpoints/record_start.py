"""The first line of a run's record: what is trained, and with which programs it is computed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import Any

from homelab.worker.runtime import process_group
from homelab.worker.runtime.task import Task

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def facts_of(task: Task, rows: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The same on every rank: of versions, those of the first rank count. Collective. `rows` as `row_agreement.of` gives them.

    "model" is a digest of what the launch has seen of the base model's files; None where they were downloaded only later.
    """
    model = task.run.get("model")
    own = {**versions(), "homelab": str(task.run.get("homelab", "")), "code": str(task.run.get("code_hash", ""))[:16]}
    (first, *_) = process_group.exchange("versions", json.dumps(own))
    return {
        "recipe_hash": task.recipe_hash,
        "precision": task.precision,
        "rows": {role: entry["sha256"][:32] for role, entry in rows.items()},
        "model": hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:32] if model else None,
        "versions": json.loads(first),
    }


def versions() -> dict[str, str]:
    """The packages that compute, as they are installed here: name -> version."""
    version_of = {}
    for package in PACKAGES:
        try:
            version_of[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_of
