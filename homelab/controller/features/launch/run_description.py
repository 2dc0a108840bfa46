"""run.json: what a run is, from a launch that was checked and planned."""

from __future__ import annotations

import subprocess
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from homelab import __version__
from homelab.controller.attempt import inputs
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.planning.types import Plan
from homelab.controller.remote import ship
from homelab.controller.run import fingerprint, run_record
from homelab.shared.law import model_chance
from homelab.shared.protocol import profile_files, quantisation, row_forms


def describe(prepared: Prepared, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """run.json: what never changes in a run."""
    described: dict[str, Any] = {"train": None, "eval": None}
    for item in prepared.material:
        described[item.role] = {
            "kind": "hub" if item.kind == "hub" else "file",
            "sent": item.kind,
            "path": _path_of(item, prepared),
            "name": item.local.name if item.local else None,
            "sha256": digest_of(item, prepared.evidence),
            **item.place,
            **(asdict(item.hub) if item.hub is not None else {}),
        }
    digests = tuple(sorted(f"{role}:{entry['sha256']}" for role, entry in described.items() if entry))
    return {
        "schema": run_record.SCHEMA,
        "name": plan.run,
        "created_at": time.time(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": prepared.recipe.model_dump(mode="json"),
        "recipe_file": prepared.recipe_path.name,
        **({"typed": asdict(prepared.typed)} if prepared.typed else {}),
        **({profile_files.REQUEST: asdict(prepared.profiled)} if prepared.profiled else {}),
        row_forms.RULES_KEY: row_forms.RULES,
        model_chance.DRAWS_KEY: model_chance.DRAWS,
        quantisation.EXPERTS_KEY: True,
        "recipe_hash": prepared.recipe.law_hash(digests),
        "data": described,
        "model": fingerprint.model_record(
            next((facts.model for facts in prepared.evidence.facts.values() if facts.model and facts.model.found), None)
        ),
        "versions": {
            name: {"python": facts.python.version, **{key: value for key, value in facts.python.packages.items() if value}}
            for name, facts in prepared.evidence.facts.items()
        },
        "homelab": __version__,
        "git_revision": _git_revision(),
        "code_hash": ship.CODE.content_hash(),
        "cluster_name": cluster.name,
    }


def _path_of(item: inputs.RecipeInput, prepared: Prepared) -> str:
    """Where the person has this file: not where a command's folder was copied to."""
    if prepared.typed is None or item.local is None or not item.local.is_relative_to(prepared.recipe_path.parent):
        return item.path
    return str(Path(prepared.typed.folder) / item.local.relative_to(prepared.recipe_path.parent))


def digest_of(item: inputs.RecipeInput, evidence: Evidence) -> str:
    """What identifies the content: the file's sha256 (as a node saw it, for files that lie there), or what is loaded from the hub."""
    if item.identity:
        return item.identity
    digests = {facts.data[item.role].sha256 for facts in evidence.facts.values() if item.role in facts.data} - {None}
    # The data check fails when nodes differ; one that is skipped on purpose still gets one stable digest.
    return min((digest for digest in digests if digest), default="missing")


def _git_revision() -> str | None:
    try:
        completed = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
