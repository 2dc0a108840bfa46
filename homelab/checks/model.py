"""model: the base model lies on every node, whole and the same, or can be downloaded; its tokenizer suits the data."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import answered, copy_between, decimal_size, environment_of, listed, on_node, path_word
from homelab.checks.evidence import Evidence
from homelab.checks.licence import gate_of
from homelab.checks.majority import majority
from homelab.config.cluster import Node
from homelab.config.recipe import Model
from homelab.facts import Facts, ModelFacts
from homelab.planning.command import quote_words

# Keys of config.json that say how the file came to be, not what the model is.
_HISTORY = ("_name_or_path", "transformers_version", "_commit_hash")


def there(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """A folder has to be whole on every node; a hub model that is not cached is a warning: the first launch downloads it."""
    model = _wanted(evidence)
    if facts.model is None:
        yield Problem("warn", "this node was not asked for the model", on_node(node, "true"))
    elif facts.model.found:
        return
    elif not model.is_folder:
        problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
        if facts.model.damaged:
            yield Problem("fail", problem, fix=_download(model, node, "--force-download"))
        elif not any(
            (*hub(evidence, node, facts), *licence(evidence, node, facts))
        ):  # they say that no launch will download it
            yield Problem("warn", f"{problem}; the first launch downloads it", fix=_download(model, node))
    else:
        problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
        source = next(iter(_found(evidence)), None)
        if source is not None:
            yield Problem("fail", problem, fix=_copy(evidence.cluster.node(source), node, model.name))
        else:
            # Once one node has it, the copies to the others are fixes of their own.
            here = Node(name="here", host="local")
            first = evidence.cluster.node(evidence.head) if evidence.head in evidence.facts else node
            hint = (
                f"is the path right? edit the recipe: [model] name = a folder that every node has, or a hub id like org/name; "
                f"if this machine has the folder, copy it to {first.name}, then preflight --fix copies it to the others: {_copy(here, first, model.name)}"
            )
            yield Problem("fail", problem, hint)


def hub(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a model has to be downloaded and the hub is out of reach, or not to be asked."""
    model = _wanted(evidence)
    if model.is_folder or not _to_be_downloaded(facts) or facts.model is None or facts.model.hub in (None, "ok"):
        return
    problem = f"{model.name}: {facts.model.problem or 'it is not there'}"
    if facts.model.hub == "offline":
        download = _download(model, node, before="HF_HUB_OFFLINE=0 TRANSFORMERS_OFFLINE=0 ")
        yield Problem("fail", f"{problem}, and HF_HUB_OFFLINE is set on this node: nothing is downloaded", fix=download)
        return
    hint = f"does it reach the internet? {on_node(node, 'curl -sSI https://huggingface.co')}"
    source = next(iter(_found(evidence).items()), None)
    if source is not None and source[1].path and "/snapshots/" in source[1].path:
        folder = source[1].path.partition("/snapshots/")[0]
        place = f"{facts.cache_folder}/{posixpath.basename(folder)}"
        hint = f"copy it from {source[0]}: {_copy(evidence.cluster.node(source[0]), node, folder, place)}"
    yield Problem("fail", f"{problem}, and the hub cannot be reached from here ({facts.model.hub})", hint)


def licence(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a gated model has to be downloaded by a node without a token."""
    model = _wanted(evidence)
    terms = None if model.is_folder else gate_of(model.name)
    if terms is None or not _to_be_downloaded(facts) or facts.model is None or facts.model.has_token is not False:
        return
    message = f"{model.name}: not in the hub cache; its download asks for {terms}, and there is no token of the hub on this node"
    login = on_node(node, f"{_tool(node)} auth login")
    login = login.replace("ssh ", "ssh -t ", 1) if node.host != "local" else login  # it asks for the token
    hint = f"accept the terms at https://huggingface.co/{model.name}, make a token at https://huggingface.co/settings/tokens, then: {login}"
    yield Problem("fail", message, f"{hint}; or set HF_TOKEN here: a launch takes it along")


def _to_be_downloaded(facts: Facts) -> bool:
    return facts.model is not None and not facts.model.found and not facts.model.damaged


def same(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where config.json says another model than on most nodes."""
    if facts.model is None or not facts.model.found:
        return
    mine = _essence(facts.model.config)
    common, like = _common_config(evidence)
    if mine != common:
        keys = _differing_keys(json.loads(mine), json.loads(common))
        message = f"config.json is not that of {listed(like)}: {'; '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
        yield Problem("fail", message, fix=_alike(evidence, node, like[0]))


def files(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where files of weights or tokenizer are not those of most nodes, or not what the hub had; warn where only sizes are known."""
    model = _wanted(evidence)
    if facts.model is None or not facts.model.found:
        return
    damaged = [
        name for name, file in facts.model.files.items() if file.sha256 and file.blob and file.sha256 != file.blob
    ]
    if damaged:
        message = f"{listed(damaged)} {_is(damaged)} damaged: not what was downloaded from the hub (sha256)"
        yield Problem("fail", message, fix=_download(model, node, "--force-download"))
        return
    _, like = _common_config(evidence)
    if node.name not in like:
        return  # another model has other files
    found = {name: entry for name, entry in _found(evidence).items() if name in like}
    if not all(entry.files for entry in found.values()):
        yield from _another_size(evidence, node, found)
        return
    odd = {name: _odd_files(evidence, name, found) for name in found}
    if odd[node.name]:
        well = [name for name in found if not odd[name]] or [name for name in found if name != node.name]
        names = odd[node.name]
        named = listed(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"
        yield Problem("fail", f"{named} {_is(names)} not as on {listed(well)}", fix=_alike(evidence, node, well[0]))


def _odd_files(evidence: Evidence, node: str, found: Mapping[str, ModelFacts]) -> list[str]:
    """Files of a node that are not those of most nodes: like is compared with like, full digests or samples.

    Which files there are counts for a folder alone: of a hub model, what is missing is downloaded.
    """
    odd = []
    for name in sorted({name for entry in found.values() for name in entry.files}):
        mine = found[node].files.get(name)
        having = {other: entry.files[name] for other, entry in found.items() if name in entry.files}
        usual = majority({other: other in having for other in found}, evidence.head)
        if _wanted(evidence).is_folder and usual != (mine is not None):
            odd.append(name)
            continue
        if mine is None:
            continue
        whole = {other: file.sha256 for other, file in having.items() if file.sha256}
        parts = {other: (file.size_bytes, file.sampled) for other, file in having.items()}
        if (node in whole and whole[node] != majority(whole, evidence.head)) or parts[node] != majority(
            parts, evidence.head
        ):
            odd.append(name)
    return odd


def _another_size(evidence: Evidence, node: Node, found: Mapping[str, ModelFacts]) -> Iterator[Problem]:
    """warn where an agent told no digests and the files have another size than on most nodes."""
    if not _wanted(evidence).is_folder:
        return
    sizes = {name: entry.size_bytes or 0 for name, entry in found.items()}
    size = majority(sizes, evidence.head)
    if sizes[node.name] != size:
        holders = [name for name in found if sizes[name] == size]
        message = f"its files have {sizes[node.name]} bytes, those of {listed(holders)} {size}: not the same copy"
        yield Problem("warn", message, fix=_alike(evidence, node, holders[0]))


def chat_template(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the data is chat and the tokenizer has no template for it (the worker's own rule)."""
    recipe, sample = evidence.recipe, evidence.sample
    form = recipe.data.format if recipe is not None and recipe.data is not None else "auto"
    needed = form == "chat" or (sample is not None and any(file.needs_chat_template for file in sample.files.values()))
    if not needed or facts.model is None or not facts.model.found or facts.model.has_chat_template is not False:
        return
    message = "the data is chat, but the model's tokenizer has no chat template"
    source = next((name for name, entry in _found(evidence).items() if entry.has_chat_template), None)
    if source is not None:
        yield Problem("fail", f"{message}; that of {source} has one", fix=_alike(evidence, node, source))
        return
    hint = 'edit the recipe: [model] name = the "-Instruct" or "-chat" version of the model; or give the data as prompt and completion'
    yield Problem("fail", message, hint)


def tokenizer(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the tokenizer, tried on one node, does not load or cannot say which characters a token covers."""
    if (
        evidence.recipe is None
        or evidence.recipe.model is None
        or evidence.sample is None
        or evidence.sample.tokenizer is None
    ):
        return
    said = evidence.sample.tokenizer
    yield evidence.sample.node, Problem("fail", said.message, said.hint or "copy the model's folder again")


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _wanted(evidence: Evidence) -> Model:
    assert evidence.recipe is not None and evidence.recipe.model is not None
    return evidence.recipe.model


def _found(evidence: Evidence) -> dict[str, ModelFacts]:
    """The nodes that have the model."""
    return {node.name: facts.model for node, facts in answered(evidence) if facts.model and facts.model.found}


def _common_config(evidence: Evidence) -> tuple[str, list[str]]:
    """What config.json says on most nodes, and who they are."""
    configs = {name: _essence(entry.config) for name, entry in _found(evidence).items()}
    common = majority(configs, evidence.head)
    return common, [name for name, essence in configs.items() if essence == common]


def _alike(evidence: Evidence, node: Node, source: str) -> str:
    model, found = _wanted(evidence), _found(evidence)
    if model.is_folder:
        return _copy(evidence.cluster.node(source), node, model.name)
    mine, theirs = (found[name].path if name in found else None for name in (node.name, source))
    if (
        mine and theirs and posixpath.basename(mine) == posixpath.basename(theirs)
    ):  # the same commit: one copy is damaged
        return _download(model, node, "--force-download")
    return f"{_download(model, node)} && {_download(model, evidence.cluster.node(source))}"  # both to the newest


def _copy(source: Node, node: Node, folder: str, place: str | None = None) -> str:
    parent = posixpath.dirname(place or folder)
    return f"{on_node(node, f'mkdir -p {path_word(parent)}')} && {copy_between(source, folder, node, parent + '/')}"


def _download(model: Model, node: Node, *options: str, before: str = "") -> str:
    revision = ["--revision", model.revision] if model.revision else []
    return on_node(node, f"{before}{_tool(node)} {quote_words(['download', model.name, *revision, *options])}")


def _tool(node: Node) -> str:
    environment = environment_of(node)
    return path_word(f"{environment}/bin/hf") if environment else "hf"


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


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if facts.model is None:
        return "not looked at"
    kind = (facts.model.config or {}).get("model_type")
    size = decimal_size(facts.model.size_bytes) if facts.model.size_bytes is not None else "size not known"
    return f"{kind}, {size}" if isinstance(kind, str) else size


def _needs(evidence: Evidence) -> str | None:
    if evidence.recipe is None:
        return "needs a recipe: homelab preflight RECIPE"
    return "the recipe's [script] brings its own" if evidence.recipe.model is None else None


SUBJECT = Subject(
    "model",
    "the base model is there or can be downloaded, whole and the same everywhere",
    (
        Check("model.there", "the base model is on the node, or in its hub cache", "fail", "model", of_node=there),
        Check("model.hub", "a base model that has to be downloaded can be", "fail", "model", of_node=hub),
        Check(
            "model.licence",
            "a gated base model is cached, or the node has a token of the hub",
            "fail",
            "model",
            of_node=licence,
        ),
        Check("model.same", "config.json of the base model says the same on every node", "fail", "model", of_node=same),
        Check(
            "model.files",
            "weights and tokenizer are the same files on every node, by digest",
            "fail",
            "model",
            of_node=files,
        ),
        Check("model.tokenizer", "the base model's tokenizer loads", "fail", "sample", of_cluster=tokenizer),
        Check(
            "model.chat_template",
            "the tokenizer has a chat template where the data is chat",
            "fail",
            "model",
            of_node=chat_template,
        ),
    ),
    _summary,
    _needs,
)
