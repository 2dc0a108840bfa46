"""The model card: what this model is, from what, how, and how good it became."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import PurePosixPath
from typing import Any

from homelab.worker.curves import Curves
from homelab.worker.metrics import perplexity
from homelab.worker.task import Task

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def model_card(task: Task, curves: Curves) -> str:
    """README.md with the front matter that the hub reads (base model, library), losses before and after, recipe, data, cluster, versions.

    People publish it: it names no folder of a node, which tells who has an account there.
    """
    method, model = task.section("method"), _shown(task.section("model"))
    library = "transformers" if method["kind"] == "full" else "peft"
    front = [f"base_model: {json.dumps(model['name'])}", f"library_name: {library}", "pipeline_tag: text-generation"]
    name = task.run.get("name", task.run_dir.name)
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {name}",
        f"`{model['name']}` fine-tuned with {_method(method)}, on {_cluster(task)}.",
        "## Result",
        _results(curves, int(curves.last[0]) if curves.last else 0),
        "## Data",
        "\n".join(_data(role, source, task.section("data")) for role, source in task.run["data"].items() if source),
        "## Recipe",
        "```json\n" + json.dumps(_shown(task.run["recipe"]), indent=2) + "\n```",
        f"Fingerprint of recipe and data: `{task.recipe_hash}`. The recipe alone decides the training: shares and nodes do not change it.",
        "## Versions",
        "\n".join(f"- {package} {version}" for package, version in _versions().items()),
    ]
    return "\n\n".join(parts) + "\n"


def _method(method: dict[str, Any]) -> str:
    if method["kind"] == "full":
        return "all its weights trained"
    base = "4-bit NF4 base, " if method["kind"] == "qlora" else ""
    return f"{method['kind']} ({base}rank {method['rank']}, alpha {method['alpha']}, targets {method['targets']})"


def _cluster(task: Task) -> str:
    entries = sorted(task.plan["ranks"], key=lambda entry: entry["rank"])
    shares = ", ".join(f"{entry['node']} {entry['share']}" for entry in entries)
    return f"{task.world_size} process(es) in {task.precision}; rows of each global batch: {shares}"


def _results(curves: Curves, steps: int) -> str:
    """The whole run's, whoever trained its first steps: before and after, and the best between."""
    lines = ["| | loss per token | perplexity |", "|---|---|---|"]
    losses = curves.eval_losses
    best = min(losses, key=lambda step: (losses[step], -step), default=None)
    for step in sorted({*([min(losses), max(losses)] if losses else []), *([best] if best is not None else [])}):
        said = [word for word, holds in (("before training", step == 0), ("the best", step == best), ("the end", step == steps)) if holds]
        lines.append(_row(f"held-out rows, step {step}{' (' + ', '.join(said) + ')' if said else ''}", losses[step]))
    for title, entry in (("first", curves.first), ("last", curves.last)):
        lines += [_row(f"training, {title} step ({entry[0]})", entry[1])] if entry else []
    return "\n".join(lines)


def _row(title: str, loss: float) -> str:
    return f"| {title} | {loss:.4f} | {_number(perplexity(loss))} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _data(role: str, source: dict[str, Any], spelled: dict[str, Any]) -> str:
    """As the recipe spells it; where a node keeps its copy is nobody's business."""
    digest = f", sha256 `{source['sha256']}`" if source.get("sha256") else ""
    return f"- {role}: `{_shown(spelled.get(role) or PurePosixPath(source['path']).name)}`{digest}"


def _shown(value: Any) -> Any:
    """The same, with the name alone of whatever lies in a folder of a machine."""
    if isinstance(value, dict):
        return {key: _shown(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    return PurePosixPath(value).name if isinstance(value, str) and value.startswith(("/", "~")) and len(value) > 1 else value


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
