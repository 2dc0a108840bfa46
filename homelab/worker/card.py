"""The model card: what this model is, from what, how, and how good it became."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

from homelab.worker.metrics import perplexity
from homelab.worker.task import Task

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def model_card(task: Task, eval_losses: Mapping[int, float], train_losses: Sequence[float]) -> str:
    """README.md with the front matter that the hub reads (base model, library), losses before and after, recipe, data, cluster, versions.

    `eval_losses` maps steps to losses over held-out rows in this attempt; `train_losses` are this attempt's, one per step.
    """
    method, model = task.section("method"), task.section("model")
    library = "transformers" if method["kind"] == "full" else "peft"
    front = [f"base_model: {json.dumps(model['name'])}", f"library_name: {library}", "pipeline_tag: text-generation"]
    name = task.run.get("name", task.run_dir.name)
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {name}",
        f"`{model['name']}` fine-tuned with {_method(method)}, on {_cluster(task)}.",
        "## Result",
        _results(eval_losses, train_losses),
        "## Data",
        "\n".join(_data(role, source) for role, source in task.run["data"].items() if source),
        "## Recipe",
        "```json\n" + json.dumps(task.run["recipe"], indent=2) + "\n```",
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


def _results(eval_losses: Mapping[int, float], train_losses: Sequence[float]) -> str:
    lines = ["| | loss per token | perplexity |", "|---|---|---|"]
    for step, loss in sorted(eval_losses.items()):
        lines.append(f"| held-out rows, step {step} | {loss:.4f} | {_number(perplexity(loss))} |")
    for title, losses in (("first", train_losses[:1]), ("last", train_losses[-1:])):
        lines.extend(f"| {title} training step here | {loss:.4f} | {_number(perplexity(loss))} |" for loss in losses)
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _data(role: str, source: dict[str, Any]) -> str:
    digest = f", sha256 `{source['sha256']}`" if source.get("sha256") else ""
    return f"- {role}: `{source['path']}`{digest}"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
