"""A sample of the training data before the launch: some rows through the model's own tokenizer, on one node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, InputError, MissingError
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, majority
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.reading import read
from homelab.controller.features.preflight import data_sample
from homelab.controller.remote import ship
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import hub_token
from homelab.shared.protocol.data_rows import beginning, longest_after
from homelab.shared.protocol.worker_messages import SampleResult

SENT_BYTES = 4 << 20  # of a file that lies on this machine: 35 ms on 1 Gbit/s
_KEPT_S, _LOOK_S = 20.0, 150.0


def look(fleet: Fleet, evidence: Evidence, recipe: Recipe, material: list[RecipeInput], previews: int = 0) -> SampleResult | None:
    """What is in the recipe's data. None where there is nothing to look at: a [script].

    One node looks that has the model and the packages for it; without such a node, rows are read and not counted in tokens. Raises
    nothing: who could not look is `refused`. The second look at the same files is answered from what the node has kept; the hub is asked
    every time, and says which revision there is. `previews`: so many rows are shown as the model will read them.
    """
    items = {item.role: item for item in material if item.role in ("train", "eval")}
    if not isinstance(recipe, TrainRecipe) or not items or not evidence.facts:
        return None
    node, folder = _place(evidence, items)
    try:
        request, body = question(evidence, recipe, items, node, folder)
        if previews:
            request["key"] = hashlib.sha256(f"{request['key']} {previews}".encode()).hexdigest()
            for file in request["files"].values():
                file["previews"] = previews
        if not request["files"]:
            return None  # they have to lie on the nodes, and do not
        agent = fleet.agent(node)
        answer = None
        if not any(item.hub for item in items.values()):
            answer = agent.ask("sample-data", {**request, "files": {}, "only_kept": True}, timeout_s=_KEPT_S)["sample"]
        if answer is None:
            for file in request["files"].values():
                if file["bytes"] and not file["whole"]:
                    file["longest"] = longest_after(file["shown"], file["bytes"])
            answer = agent.send("sample-data", request, body, timeout_s=_LOOK_S)["sample"]
    except HomelabError as error:
        return SampleResult(node=node, refused=error.message[:500])
    except OSError as error:  # a file here that is gone or cannot be read: shipping it will say so
        return SampleResult(node=node, refused=str(error)[:500])
    return read(SampleResult, {**(answer or {}), "node": node})


def _place(evidence: Evidence, items: dict[str, RecipeInput]) -> tuple[str, str | None]:
    """(the node that looks, its folder of the model): of those that have all it takes the one with most cores, or the head.

    Where the nodes' data differs, one of those that have the same as most.
    """
    names = sorted(evidence.facts, key=lambda name: (-evidence.facts[name].system.cpu_count, name != evidence.head))
    for role in (role for role, item in items.items() if item.kind == "on-node"):
        digests = {
            name: file.sha256 for name in names if (file := evidence.facts[name].data.get(role)) is not None and file.found and file.sha256
        }
        if digests:
            common = majority(digests, evidence.head)
            names = [name for name in names if digests.get(name) == common] or names
    for name in names:
        facts = evidence.facts[name]
        if facts.model is not None and facts.model.found and facts.model.path and facts.python.packages.get("transformers"):
            return name, facts.model.path
    return names[0], None


def question(
    evidence: Evidence, recipe: TrainRecipe, items: dict[str, RecipeInput], node: str, folder: str | None
) -> tuple[dict[str, Any], bytes]:
    """The request and its body. Its key names all that the answer depends on: a file's name says how it is read, and the answer names
    its path."""
    facts = evidence.facts[node]
    files: dict[str, dict[str, Any]] = {}
    digests: dict[str, Any] = {}
    secrets: dict[str, str] = {}
    body = b""
    for role, item in sorted(items.items()):
        if item.kind == "shipped":
            assert item.local is not None
            rows, whole = beginning(str(item.local), SENT_BYTES)
            files[role] = {"shown": str(item.local), "bytes": len(rows or b""), "whole": whole, "unread": rows is None}
            body += rows or b""
            digests[role] = [item.sha256, str(item.local)]
        elif item.hub is not None:
            files[role] = {"shown": f"hub:{item.path}", "bytes": None, "whole": False, "hub": asdict(item.hub)}
            secrets = hub_token.to_send()  # a launch brings it along, too
        elif (file := facts.data.get(role)) is not None and file.found:
            files[role] = {"shown": item.path, "bytes": None, "path": item.path}
            digests[role] = [file.sha256, item.path]
    settings = {key: value for key, value in asdict(recipe.data).items() if key not in ("train", "eval")}
    now = datetime.now(UTC)
    of_model = facts.model.model_dump(mode="json", include={"config", "files", "path"}) if folder and facts.model else None
    depends = [
        digests,
        settings,
        recipe.train.seq_len,
        of_model,
        ship.CODE.content_hash(),
        [facts.python.executable, facts.python.packages],
        f"{now:%Y-%m-%d}" if facts.model and facts.model.template_writes_date else "",
    ]
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    request = {
        "key": key,
        "files": files,
        "data": settings,
        "seq_len": recipe.train.seq_len,
        "model": folder,
        "revision": None,
        "moment": now.isoformat(timespec="seconds"),
        "secrets": secrets,
        "recipe_environment": recipe.environment,
    }
    return request, body


def data_fault(fleet: Fleet, evidence: Evidence, recipe: Recipe, items: Sequence[RecipeInput], say: Say) -> InputError | None:
    """The first finding that fails; None where there is none, or nothing to look at."""
    if recipe.data is None or not evidence.facts:
        return None
    say("looking into the data")
    seen = replace(evidence, sample=data_sample.look(fleet, evidence, recipe, list(items)))
    failed = [finding for finding in registry.judge_all(seen, registry.skipped(only=["data"], skip=[])) if finding.level == "fail"]
    if not failed:
        return None
    kind = MissingError if failed[0].check == "data.there" else InputError
    return kind(failed[0].message, where=f"check {failed[0].check}", hint=failed[0].hint)
