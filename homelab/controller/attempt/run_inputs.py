"""The data files and the script of a run that goes on, from its own description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.run import run_record
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.recipe import HubData


def inputs_of(paths: RunPaths, run_json: Mapping[str, Any]) -> list[RecipeInput]:
    """What the run needs; a shipped file from where it was at the launch, or the copy in the run's folder."""
    return [_input(paths, role, entry) for role, entry in run_json["data"].items() if entry is not None]


def _input(paths: RunPaths, role: str, entry: Mapping[str, Any]) -> RecipeInput:
    local = None
    if entry.get("sent") == "shipped":
        own = [Path(original)] if (original := shipped.original_of(entry)) else []
        candidates = [*own, paths.code / run_record.inside(entry.get("inside") or entry["name"])]
        # The person may have edited the file since: only the content that the run began with counts.
        local = next((path for path in candidates if path.is_file() and file_sha256(path) == entry["sha256"]), candidates[-1])
    hub = None
    if entry["kind"] == "hub":
        hub = HubData(entry["path"], entry.get("config"), entry.get("split", "train"), entry.get("revision"))
    return RecipeInput(
        role, entry.get("sent", "on-node"), entry["path"], local, entry["sha256"] if local else None,
        folder=entry.get("folder"), inside=entry.get("inside"), hub=hub,
    )  # fmt: skip
