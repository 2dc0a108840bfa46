"""model: the base model lies on every node, whole and the same."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from homelab.checks.commands import answered, copy_between, decimal_size, environment_of, listed, on_node, path_word
from homelab.checks.evidence import Evidence, Finding
from homelab.checks.majority import majority
from homelab.config.cluster import Node
from homelab.config.recipe import Model
from homelab.facts import Facts, ModelFacts
from homelab.planning.command import quote_words

ID = "model"
# Keys of config.json that say how the file came to be, not what the model is.
_HISTORY = ("_name_or_path", "transformers_version", "_commit_hash")


def judge(evidence: Evidence) -> Iterator[Finding]:
    """A folder has to be whole on every node; a hub model that is not cached is a warning: the first launch downloads it."""
    if evidence.recipe is None:
        yield Finding(ID, "", "ok", "needs a recipe: homelab preflight RECIPE")
        return
    model = evidence.recipe.model
    if model is None:
        yield Finding(ID, "", "ok", "the recipe's [script] brings its own")
        return
    there = {node.name: facts.model for node, facts in answered(evidence) if facts.model and facts.model.found}
    for node, facts in answered(evidence):
        if facts.model is None:
            yield Finding(ID, node.name, "warn", "this node was not asked for the model", on_node(node, "true"))
        elif not facts.model.found:
            yield _absent(evidence, model, node, facts.model, there)
        else:
            found = list(_different(evidence, model, node, facts, there))
            yield from found or [Finding(ID, node.name, "ok", _summary(facts.model))]


def _absent(
    evidence: Evidence, model: Model, node: Node, facts: ModelFacts, there: Mapping[str, ModelFacts]
) -> Finding:
    problem = facts.problem or "it is not there"
    if not model.is_folder:
        message = f"{model.name}: {problem}; the first launch downloads it"
        return Finding(ID, node.name, "warn", message, _download(model, node))
    source = next(iter(there), None)
    if source is not None:
        hint = _copy(evidence.cluster.node(source), node, model.name)
    else:
        hint = f"copy the model to {path_word(model.name)} on every node, or edit the recipe: [model] name = a hub id like org/name"
    return Finding(ID, node.name, "fail", f"{model.name}: {problem}", hint)


def _different(
    evidence: Evidence, model: Model, node: Node, facts: Facts, there: Mapping[str, ModelFacts]
) -> Iterator[Finding]:
    assert facts.model is not None
    configs = {name: _essence(entry.config) for name, entry in there.items()}
    common = majority(configs, evidence.head)
    like = [name for name, essence in configs.items() if essence == common]
    if configs[node.name] != common:
        keys = _differing_keys(json.loads(configs[node.name]), json.loads(common))
        message = f"config.json is not that of {listed(like)}: {'; '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
        yield Finding(ID, node.name, "fail", message, _same(evidence, model, node, like[0]))
        return
    sizes = {name: there[name].size_bytes or 0 for name in like}
    size = majority(sizes, evidence.head)
    if model.is_folder and sizes[node.name] != size:
        holders = [name for name in like if sizes[name] == size]
        message = f"its files have {sizes[node.name]} bytes, those of {listed(holders)} {size}: not the same copy"
        yield Finding(ID, node.name, "warn", message, _same(evidence, model, node, holders[0]))


def _same(evidence: Evidence, model: Model, node: Node, source: str) -> str:
    if model.is_folder:
        return _copy(evidence.cluster.node(source), node, model.name)
    return f"{_download(model, node)} && {_download(model, evidence.cluster.node(source))}"  # both to the newest


def _copy(source: Node, node: Node, folder: str) -> str:
    parent = posixpath.dirname(folder)
    return f"{on_node(node, f'mkdir -p {path_word(parent)}')} && {copy_between(source, folder, node, parent + '/')}"


def _download(model: Model, node: Node) -> str:
    environment = environment_of(node)
    tool = path_word(f"{environment}/bin/hf") if environment else "hf"
    revision = ["--revision", model.revision] if model.revision else []
    return on_node(node, f"{tool} {quote_words(['download', model.name, *revision])}")


def _essence(config: dict[str, Any] | None) -> str:
    return json.dumps({key: value for key, value in (config or {}).items() if key not in _HISTORY}, sort_keys=True)


def _differing_keys(mine: dict[str, Any], common: dict[str, Any]) -> list[str]:
    def short(value: Any) -> str:
        text = json.dumps(value)
        return text if len(text) <= 24 else text[:21] + "..."

    return [
        f"{key} is {short(mine.get(key))} here, {short(common.get(key))} there"
        for key in sorted(mine.keys() | common.keys())
        if mine.get(key) != common.get(key)
    ]


def _summary(facts: ModelFacts) -> str:
    kind = (facts.config or {}).get("model_type")
    size = decimal_size(facts.size_bytes) if facts.size_bytes is not None else "size not known"
    return f"{kind}, {size}" if isinstance(kind, str) else size
