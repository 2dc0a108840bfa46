"""One question to the model of a run, asked where the model lies."""

from __future__ import annotations

from typing import Any

from homelab.control import find
from homelab.errors import HomelabError, InputError
from homelab.remote.fanout import Fleet
from homelab.runs.paths import RunPaths

ANSWER_TIMEOUT_S = 600.0


def ask(fleet: Fleet, paths: RunPaths, prompt: str, *, base: bool, max_new_tokens: int) -> dict[str, Any]:
    """{"answer", ...} from the head, or from another node that has a checkpoint when the head cannot be asked.

    Raises the head's error when nobody can answer.
    """
    plan = find.plan_of(paths)
    if find.recipe_of(paths)[1].model is None:
        raise InputError(
            "this run was trained by its own [script]: only that program knows how to ask its model",
            where=paths.name,
            hint="look for what it has written below the run's folder on the nodes: homelab status",
        )
    request = {
        "run": paths.name,
        "prompt": prompt,
        "base": base,
        "max_new_tokens": max_new_tokens,
        "timeout_s": ANSWER_TIMEOUT_S,
    }
    first: HomelabError | None = None
    for name in [plan.head, *(node.name for node in plan.nodes if node.name != plan.head)]:
        try:
            answer = fleet.agent(name).ask("chat", request, timeout_s=ANSWER_TIMEOUT_S + 20)
        except HomelabError as error:
            first = first or error
            continue
        except KeyError:
            continue
        return {"node": name, **answer}
    raise first or HomelabError("none of the run's nodes is in cluster.toml", where=paths.name, hint="homelab runs")
