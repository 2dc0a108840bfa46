"""model: the base model lies on every node, whole and the same, or can be downloaded; its tokenizer suits the data."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from homelab.controller.base.hint import Command, Hint, chain, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import decimal_size, listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, answered, lacks_model, majority
from homelab.controller.checks.training.licence import gate_of
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import copy_between, environment_of, on_node, path_word
from homelab.controller.facts.training import ModelFacts
from homelab.shared.protocol import model_forms
from homelab.shared.recipe import Model

# It sends what this machine has, or can fetch, to every node.
_SEND = homelab("setup --recipe RECIPE")


@check("model.there", "the base model is on the node, or in its hub cache", worst="fail", sees="model")
def there(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """A folder has to be whole on every node; a hub model that is not cached is a warning: the first launch downloads it."""
    model = _wanted(evidence)
    if facts.model is None:
        yield Problem("warn", "this node was not asked for the model", on_node(node, "true"))
    elif facts.model.found:
        return
    elif facts.model.instead:
        yield Problem("fail", f"{model.name}: {facts.model.problem}", _in_its_place(facts.model))
    elif not model.is_folder:
        problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
        if facts.model.damaged:
            yield Problem("fail", problem, fix=_download(model, node, "--force-download"))
        # Problems of the hub and of the licence say that no launch will download it.
        elif not _refused_by_hub(evidence) and not any((*hub(evidence, node, facts), *licence(evidence, node, facts))):
            yield Problem("warn", f"{problem}; the first launch downloads it", fix=_download(model, node))
    else:
        problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
        source = next(iter(_local_models(evidence)), None)
        if source is not None:
            copy = _copy(evidence.cluster.node(source), node, model.name)
            yield Problem("fail", problem, Hint("{}, if this machine has the folder too; or from {}: {}", _SEND, source, copy), fix=copy)
        else:
            hint = Hint(
                "{} sends it to the nodes, if this machine has the folder; if the path is wrong, edit the recipe: [model] name = a folder, or a hub id like org/name",
                _SEND,
            )
            yield Problem("fail", problem, hint)


def _in_its_place(model: ModelFacts) -> str:
    """The edit for a folder or a repository that holds something else than a base model."""
    if model.instead == "adapters":
        whole = f'"{model.base}"' if model.base else "the model that they belong to"
        return Hint(
            "edit the recipe: [model] name = {}; to continue from these adapters, merge them into their model first ({}), and name the result",
            whole,
            homelab("merge RUN"),
        )
    if model.instead == "gguf":
        return Hint(
            "edit the recipe: [model] name = the 16-bit model that it was made from (its page on the hub names it); {} makes a GGUF of the result",
            homelab("gguf RUN"),
        )
    return f"edit the recipe: {model_forms.HELD[model.instead][1]}"


@check("model.hub", "the base model can be downloaded if a node lacks it", worst="fail", sees="model")
def hub(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a model has to be downloaded and the hub is out of reach, or not to be asked."""
    model = _wanted(evidence)
    if model.is_folder or not _to_be_downloaded(facts) or facts.model is None or facts.model.hub in (None, "ok"):
        return
    problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
    if facts.model.hub == "offline":
        download = _download(model, node, before="HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 ")
        yield Problem("fail", f"{problem}, and HF_HUB_OFFLINE is set on this node, so nothing is downloaded", fix=download)
        return
    asked = on_node(node, "curl -sSI https://huggingface.co")
    hint = Hint("{} fetches it on this machine and sends it to the nodes; or does {} reach the internet? {}", _SEND, node.name, asked)
    source = next(iter(_local_models(evidence).items()), None)
    if source is not None and source[1].path and "/snapshots/" in source[1].path:
        folder = source[1].path.partition("/snapshots/")[0]
        place = f"{facts.resources.cache_folder}/{posixpath.basename(folder)}"
        copy = _copy(evidence.cluster.node(source[0]), node, folder, place)
        hint = Hint("{} fetches it on this machine and sends it to the nodes; or from {}: {}", _SEND, source[0], copy)
    yield Problem("fail", f"{problem}, and the hub cannot be reached from here ({facts.model.hub})", hint)


@check("model.licence", "a gated base model is cached, or the node has a token of the hub", worst="fail", sees="model")
def licence(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a gated model has to be downloaded by a node without a token."""
    model = _wanted(evidence)
    terms = None if model.is_folder else gate_of(model.name)
    if terms is None or not _to_be_downloaded(facts) or facts.model is None or facts.model.has_token is not False:
        return
    if _refused_by_hub(evidence):  # a node has asked: model.name says more
        return
    message = f"{model.name}: not in the hub cache; its download needs {terms}, and there is no token of the hub on this node"
    login = on_node(node, f"{_tool(node)} auth login", options=["-t"])  # it asks for the token
    hint = f"accept the terms at https://huggingface.co/{model.name}, make a token at https://huggingface.co/settings/tokens, then: {login}"
    yield Problem("fail", message, f"{hint}; or set HF_TOKEN here: a launch sends it to the nodes")


def _refused_by_hub(evidence: Evidence) -> bool:
    return evidence.build is not None and any(finding.topic == "hub" and finding.level == "fail" for finding in evidence.build.findings)


def _to_be_downloaded(facts: Facts) -> bool:
    return facts.model is not None and not facts.model.found and not facts.model.damaged


@check("model.same", "config.json of the base model is the same on every node", worst="fail", sees="model")
def same(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where config.json says another model than on most nodes."""
    if facts.model is None or not facts.model.found:
        return
    own_config = _essence(facts.model.config)
    common, like = _common_config(evidence)
    if own_config != common:
        keys = _differing_keys(json.loads(own_config), json.loads(common))
        message = f"config.json differs from that of {listed(like)}: {'; '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
        yield Problem("fail", message, *_alike(evidence, node, like[0]))


@check("model.files", "weights and tokenizer are the same files on every node, by digest", worst="fail", sees="model")
def files(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where files of weights or tokenizer are not those of most nodes, or not what the hub had; warn where only sizes are known."""
    model = _wanted(evidence)
    if facts.model is None or not facts.model.found:
        return
    damaged = [name for name, file in facts.model.files.items() if file.sha256 and file.blob and file.sha256 != file.blob]
    if damaged:
        message = f"{listed(damaged)} {_is(damaged)} damaged: not the file of the hub (sha256)"
        yield Problem("fail", message, fix=_download(model, node, "--force-download"))
        return
    _, like = _common_config(evidence)
    if node.name not in like:
        return  # another model has other files
    models = {name: entry for name, entry in _local_models(evidence).items() if name in like}
    if not all(entry.files for entry in models.values()):
        yield from _another_size(evidence, node, models)
        return
    odd = {name: _odd_files(evidence, name, models) for name in models}
    if odd[node.name]:
        well = [name for name in models if not odd[name]] or [name for name in models if name != node.name]
        names = odd[node.name]
        named = listed(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"
        yield Problem("fail", f"{named} {_is(names)} not as on {listed(well)}", *_alike(evidence, node, well[0]))


def _odd_files(evidence: Evidence, node: str, models: Mapping[str, ModelFacts]) -> list[str]:
    """Files of a node that are not those of most nodes: like is compared with like, full digests or samples.

    Which files there are counts for a folder alone: of a hub model, what is missing is downloaded.
    """
    odd = []
    for name in sorted({name for entry in models.values() for name in entry.files}):
        own_file = models[node].files.get(name)
        having = {other: entry.files[name] for other, entry in models.items() if name in entry.files}
        usual = majority({other: other in having for other in models}, evidence.head)
        if _wanted(evidence).is_folder and usual != (own_file is not None):
            odd.append(name)
            continue
        if own_file is None:
            continue
        whole = {other: file.sha256 for other, file in having.items() if file.sha256}
        parts = {other: (file.size_bytes, file.sampled) for other, file in having.items()}
        if (node in whole and whole[node] != majority(whole, evidence.head)) or parts[node] != majority(parts, evidence.head):
            odd.append(name)
    return odd


def _another_size(evidence: Evidence, node: Node, models: Mapping[str, ModelFacts]) -> Iterator[Problem]:
    """warn where an agent told no digests and the files have another size than on most nodes."""
    if not _wanted(evidence).is_folder:
        return
    sizes = {name: entry.size_bytes or 0 for name, entry in models.items()}
    size = majority(sizes, evidence.head)
    if sizes[node.name] != size:
        holders = [name for name in models if sizes[name] == size]
        message = f"its files have {sizes[node.name]} bytes, those of {listed(holders)} {size}: they are not the same copy"
        yield Problem("warn", message, *_alike(evidence, node, holders[0]))


@check("model.chat_template", "the tokenizer has a chat template if the data is chat", worst="fail", sees="model", after="model.tokenizer")
def chat_template(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the data is chat and the tokenizer has no template for it (the worker's own rule)."""
    recipe, sample = evidence.recipe, evidence.sample
    form = recipe.data.format if recipe is not None and recipe.data is not None else "auto"
    needed = form == "chat" or (sample is not None and any(file.needs_chat_template for file in sample.files.values()))
    if not needed or facts.model is None or _has_chat_template(evidence, node, facts.model) is not False:
        return
    message = "the data is chat, but the model's tokenizer has no chat template"
    source = next((name for name, entry in _local_models(evidence).items() if entry.has_chat_template), None)
    if source is not None:
        yield Problem("fail", f"{message}; that of {source} has one", *_alike(evidence, node, source))
        return
    hint = 'edit the recipe: [model] name = the "-Instruct" or "-chat" version of the model; or give the data as prompt and completion'
    yield Problem("fail", message, hint)


def _has_chat_template(evidence: Evidence, node: Node, model: ModelFacts) -> bool | None:
    """As the node's files say, or those that this node saw on the hub."""
    if model.found:
        return model.has_chat_template
    return evidence.build.has_chat_template if evidence.build is not None and evidence.build.node == node.name else None


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _wanted(evidence: Evidence) -> Model:
    assert isinstance(evidence.recipe, TrainRecipe)
    return evidence.recipe.model


def _local_models(evidence: Evidence) -> dict[str, ModelFacts]:
    """The nodes that have the model."""
    return {node.name: facts.model for node, facts in answered(evidence) if facts.model and facts.model.found}


def _common_config(evidence: Evidence) -> tuple[str, list[str]]:
    """What config.json says on most nodes, and who they are."""
    configs = {name: _essence(entry.config) for name, entry in _local_models(evidence).items()}
    common = majority(configs, evidence.head)
    return common, [name for name, essence in configs.items() if essence == common]


def _alike(evidence: Evidence, node: Node, source: str) -> tuple[Hint, Command]:
    """What makes both the same, in words and as one command."""
    model, models = _wanted(evidence), _local_models(evidence)
    if model.is_folder:
        copy = _copy(evidence.cluster.node(source), node, model.name)
        return Hint("{}", copy), copy
    own_path, source_path = (models[name].path if name in models else None for name in (node.name, source))
    if own_path and source_path and posixpath.basename(own_path) == posixpath.basename(source_path):  # the same commit: one copy is damaged
        again = _download(model, node, "--force-download")
        return Hint("{}", again), again
    newest = chain(_download(model, node), _download(model, evidence.cluster.node(source)))
    return Hint("{}; or, without a way from there to the hub: {}", newest, _SEND), newest


def _copy(source: Node, node: Node, folder: str, place: str | None = None) -> Command:
    parent = posixpath.dirname(place or folder)
    return chain(on_node(node, f"mkdir -p {path_word(parent)}"), copy_between(source, folder, node, parent + "/"))


def _download(model: Model, node: Node, *options: str, before: str = "") -> Command:
    revision = ["--revision", model.revision] if model.revision else []
    return on_node(node, f"{before}{_tool(node)} {quote_words(['download', model.name, *revision, *options])}")


def _tool(node: Node) -> str:
    environment = environment_of(node)
    return path_word(f"{environment}/bin/hf") if environment else "hf"


def _essence(config: dict[str, Any] | None) -> str:
    return json.dumps({key: value for key, value in (config or {}).items() if key not in model_forms.HISTORY}, sort_keys=True)


def _differing_keys(own: dict[str, Any], common: dict[str, Any]) -> list[str]:
    def short(value: Any) -> str:
        text = json.dumps(value)
        return text if len(text) <= 24 else text[:21] + "..."

    return [
        f"{key} is {short(own.get(key))} here, {short(common.get(key))} there"
        for key in sorted(own.keys() | common.keys())
        if own.get(key) != common.get(key)
    ]


@subject("model", "the base model is there or can be downloaded, complete and the same everywhere", after="memory", needs=lacks_model)
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if facts.model is None:
        return "not looked at"
    kind = (facts.model.config or {}).get("model_type")
    size = decimal_size(facts.model.size_bytes) if facts.model.size_bytes is not None else "size not known"
    built = evidence.build
    trained = f", trains {built.trained:,} of {built.total:,} weights" if built is not None and built.trained else ""
    return f"{kind}, {size}{trained}" if isinstance(kind, str) else size
