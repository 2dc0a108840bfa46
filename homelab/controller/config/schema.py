"""The JSON Schema of cluster.toml, a recipe or a suite: types and limits from the definitions, descriptions from the reference."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from homelab.controller.config import reference
from homelab.controller.config.cluster import Cluster, EnergyPrice, NetworkSettings, Node, Notify
from homelab.controller.config.recipe import RecipeFile
from homelab.controller.config.suite import Suite

KINDS = ("cluster", "recipe", "suite")
_DIALECT = "http://json-schema.org/draft-07/schema#"  # that of taplo


class ClusterFile(BaseModel):
    """cluster.toml as it is written: `Cluster` has the defaults merged in."""

    network: NetworkSettings
    energy: EnergyPrice
    notify: Notify
    nodes: list[Node]


def of(kind: str) -> dict[str, Any]:
    """The JSON Schema of a `kind` of file. Raises KeyError for a kind that is not in `KINDS`."""
    schema = {"cluster": _cluster, "recipe": _recipe, "suite": _suite}[kind]()
    return {"$schema": _DIALECT, "title": {"cluster": "cluster.toml", "recipe": "a recipe", "suite": "a benchmark suite"}[kind], **schema}


def section(name: str) -> dict[str, Any]:
    """The schema of one page of the reference, like recipe.train: an object with `properties`."""
    kind, _, part = name.partition(".")
    schema = of(kind)
    if not part:
        return schema
    found = schema["properties"][part]
    found = found.get("items", found)
    result: dict[str, Any] = schema["definitions"][found["$ref"].rsplit("/", 1)[-1]] if "$ref" in found else found
    return result


def _recipe() -> dict[str, Any]:
    schema = _generated(RecipeFile, "recipe")
    trained, own = ["model", "data", "method", "train"], ["script"]
    return schema | {"oneOf": [{"required": trained}, {"required": own}]}


def _suite() -> dict[str, Any]:
    schema = _generated(Suite, "")
    _describe(schema, "suite")
    return schema


def _cluster() -> dict[str, Any]:
    schema = _generated(ClusterFile, "cluster")
    head = _without_null(Cluster.model_json_schema()["properties"])
    schema["properties"]["cluster"] = {
        "type": "object", "additionalProperties": False, "properties": {key: head[key] for key in ("name", "network", "known_hosts")},
    }  # fmt: skip
    _describe(schema["properties"]["cluster"], "cluster.cluster")
    node = schema["definitions"]["Node"]
    schema["properties"]["defaults"] = {
        "type": "object", "additionalProperties": False, "description": "Keys of a node that hold for every node; a node that sets one again wins.",
        "properties": {key: value for key, value in node["properties"].items() if key not in ("name", "host")},
    }  # fmt: skip
    schema["properties"]["nodes"]["minItems"] = 1
    return schema | {"required": ["nodes"], "additionalProperties": False}


def _generated(model: type[BaseModel], kind: str) -> dict[str, Any]:
    """The schema of a model in draft 7, without null (TOML has none), its sections described."""
    schema: dict[str, Any] = _without_null(
        model.model_json_schema(ref_template="#/definitions/{model}", schema_generator=GenerateJsonSchema)
    )
    schema["definitions"] = schema.pop("$defs", {})
    for name in reference.SECTIONS.get(kind, ()):
        if name in schema["properties"]:
            entry = schema["properties"][name]
            target = entry.get("items", entry)
            _describe(schema["definitions"][target["$ref"].rsplit("/", 1)[-1]] if "$ref" in target else target, f"{kind}.{name}")
            schema["properties"][name] = {key: value for key, value in entry.items() if key not in ("default", "title")}
    schema.pop("description", None)
    return schema


def _describe(target: dict[str, Any], name: str) -> None:
    page = reference.page(name)
    target["description"] = page.description
    for key in page.keys:
        if key.name in target.get("properties", {}):
            target["properties"][key.name]["description"] = key.description


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_null(entry) for key, entry in value.items() if not (key == "default" and entry is None)}
    if isinstance(kept.get("title"), str):
        del kept["title"]  # pydantic's, made of the key
    branches = [branch for branch in kept.get("anyOf", ()) if branch != {"type": "null"}]
    if len(branches) == 1:
        del kept["anyOf"]
        return {**kept, **branches[0]}
    return kept | ({"anyOf": branches} if branches else {})
