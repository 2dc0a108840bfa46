"""The model card: what this model is, from what, how, and how good it became."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from homelab.shared.law import early_stopping
from homelab.shared.protocol import chain
from homelab.shared.protocol.quantisation import INT8, NF4
from homelab.shared.recipe import Data, Method
from homelab.worker.checkpoints.curves import Curves
from homelab.worker.checkpoints.record_start import versions
from homelab.worker.runtime.metrics_recorder import perplexity
from homelab.worker.runtime.task import Task

_MOVED = (
    "PEFT without homelab (also in other programs) reads adapters of this model's shared experts and dense layers as those of its routed experts, "
    "and gives other answers without an error (peft 0.21). Use the merged model (`homelab merge`), or `homelab chat`."
)


def model_card(task: Task, curves: Curves, step: int, *, is_moved_by_peft: bool) -> str:
    """README.md with the front matter that the hub reads (base model, library), losses before and after, recipe, data, cluster, versions.

    `step`: of the weights. `is_moved_by_peft`: of an adapter that PEFT alone would put on other layers.

    People publish it: it names no folder of a node, which tells who has an account there.
    """
    method, model = task.method, _shown(task.model.name)
    library = "transformers" if method.kind == "full" else "peft"
    does = "text-classification" if task.objective is not None and task.objective.scores else "text-generation"
    front = [f"base_model: {json.dumps(model)}", f"library_name: {library}", f"pipeline_tag: {does}"]
    name = task.run.get("name", task.run_dir.name)
    beta = f", beta {task.objective.beta:g}" if task.objective is not None and not task.objective.scores else ""
    objective = f"{task.objective.kind} ({task.objective.rows}{beta}), " if task.objective is not None else ""
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {name}",
        f"`{model}` fine-tuned with {objective}{_method(method)}, on {_cluster(task)}.",
        "## Result",
        _results(curves, int(curves.last[0]) if curves.last else 0, of_pairs=task.objective is not None),
        f"These are the weights after step {step}"
        + (", the best of all evaluations." if step == early_stopping.best_step(curves.eval_losses) else "."),
        *(["## Use", _MOVED] if is_moved_by_peft else []),
        "## Data",
        "\n".join(_data(role, source, task.data) for role, source in task.run["data"].items() if source),
        "## Recipe",
        "```json\n" + json.dumps(_shown(task.run["recipe"]), indent=2) + "\n```",
        f"Fingerprint of recipe and data: `{task.recipe_hash}`. The recipe alone decides the training: shares and nodes do not change it.",
        *(
            [chain.card_line(curves.chain) + " `curves.jsonl` beside this file is the record; `homelab verify` computes parts of it again."]
            if curves.chain
            else []
        ),
        "## Versions",
        "\n".join(f"- {package} {version}" for package, version in versions().items()),
    ]
    return "\n\n".join(parts) + "\n"


def _method(method: Method) -> str:
    if method.kind == "full":
        return "all its weights trained"
    base = {NF4: "4-bit NF4 base, ", INT8: "8-bit base, ", None: ""}[method.quantisation]
    return f"{method.kind} ({base}rank {method.rank}, alpha {method.alpha}, targets {method.targets})"


def _cluster(task: Task) -> str:
    shares = ", ".join(f"{rank.node} {rank.share}" for rank in task.ranks)
    return f"{task.world_size} process(es) in {task.precision}; rows of each global batch: {shares}"


def _results(curves: Curves, steps: int, *, of_pairs: bool) -> str:
    """Losses of the whole run, all attempts together: before and after, and the best between."""
    lines = ["| | loss of a row |", "|---|---|"] if of_pairs else ["| | loss per token | perplexity |", "|---|---|---|"]
    losses = curves.eval_losses
    best = min(losses, key=lambda step: (losses[step], -step), default=None)
    for step in sorted({*([min(losses), max(losses)] if losses else []), *([best] if best is not None else [])}):
        labels = [word for word, holds in (("before training", step == 0), ("the best", step == best), ("the end", step == steps)) if holds]
        lines.append(_row(f"held-out rows, step {step}{' (' + ', '.join(labels) + ')' if labels else ''}", losses[step], of_pairs))
    for title, entry in (("first", curves.first), ("last", curves.last)):
        lines += [_row(f"training, {title} step ({entry[0]})", entry[1], of_pairs)] if entry else []
    return "\n".join(lines)


def _row(title: str, loss: float, of_pairs: bool) -> str:
    return f"| {title} | {loss:.4f} |" + ("" if of_pairs else f" {_number(perplexity(loss))} |")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _data(role: str, source: dict[str, Any], spelled: Data) -> str:
    """One line about a data source as the recipe spells it, without the folder of a node."""
    digest = f", sha256 `{source['sha256']}`" if source.get("sha256") else ""
    return f"- {role}: `{_shown(getattr(spelled, role, None) or PurePosixPath(source['path']).name)}`{digest}"


def _shown(value: Any) -> Any:
    """The value, with paths of a machine shortened to their last name."""
    if isinstance(value, dict):
        return {key: _shown(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    return PurePosixPath(value).name if isinstance(value, str) and value.startswith(("/", "~")) and len(value) > 1 else value
