"""Reading cluster.toml and recipes: a frozen model, or one error that lists every fault with its line (`file_faults`)."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config import near_files, typed_secrets
from homelab.controller.config.cluster import Cluster, EnergyPrice, NetworkSettings, Node, Notify
from homelab.controller.config.file_faults import Fault, faults_of, raise_faults
from homelab.controller.config.lines import key_lines, line_of, not_deep
from homelab.controller.config.recipe import Recipe, RecipeFile, parse_recipe

Section = TypeVar("Section", bound=BaseModel)


def load_cluster(path: Path) -> Cluster:
    """The cluster of `path`, defaults merged into every node and relative files made absolute.

    Raises InputError with all faults of the file at once.
    """
    return _cluster(path, *read(path, "cluster.toml", Hint("{} writes one; or name the file with --cluster FILE", homelab("init"))))


def parse_cluster(text: str, path: Path) -> Cluster:
    """`load_cluster` of a text that is to be written to `path`."""
    return _cluster(path, text, _parsed(text, path, "cluster.toml"))


def _cluster(path: Path, text: str, data: dict[str, Any]) -> Cluster:
    faults: list[Fault] = []
    sections = ["cluster", "defaults", "energy", "network", "nodes", "notify"]
    faults += [((key,), f'unknown section "{key}".{did_you_mean(key, sections)}') for key in data.keys() - set(sections)]
    head = _table(data, "cluster", faults)
    defaults = _table(data, "defaults", faults)
    for key in defaults.keys() - (Node.model_fields.keys() - {"name", "host"}):
        faults.append((("defaults", key), f'unknown key "{key}".{did_you_mean(key, Node.model_fields)}'))
    defaults = {key: value for key, value in defaults.items() if key in Node.model_fields}
    nodes = _nodes(data, defaults, faults)
    own_keys = ["name", "network", "known_hosts"]
    faults += [(("cluster", key), f'unknown key "{key}".{did_you_mean(key, own_keys)}') for key in head.keys() - set(own_keys)]
    known_hosts = head.get("known_hosts")
    if isinstance(known_hosts, str):
        head["known_hosts"] = str(_beside(path, known_hosts))
    cluster = None
    settings = {key: value for key, value in head.items() if key in own_keys}
    try:
        energy = _section(data, "energy", EnergyPrice, faults)
        notify = _section(data, "notify", Notify, faults)
        wire = _section(data, "network", NetworkSettings, faults)
        cluster = Cluster(nodes=tuple(nodes), energy=energy, notify=notify, wire=wire, **settings)
    except ValidationError as error:
        faults += [(("cluster", *location), message) for location, message in faults_of(error, Cluster)]
    faults += _clashes(nodes)
    raise_faults(path, text, faults)
    assert cluster is not None
    return cluster.model_copy(update={"nodes": tuple(_absolute_identity(path, node) for node in cluster.nodes)})


_LARGEST = 2**63 - 1  # TOML's own limit
_MOST_CHARACTERS = 1 << 20  # a long one has ten thousand; /dev/zero has no end


def load_recipe(path: Path) -> Recipe:
    """The recipe of `path`. Raises InputError with all faults of the file at once."""
    return read_recipe(path)[1]


def read_recipe(path: Path) -> tuple[str, Recipe]:
    """The text of a recipe, too."""
    text, data = read(path, "recipe", "list the recipes with: ls recipes/")
    return text, _recipe(path, text, data)


def recipe_of_text(text: str, path: Path) -> Recipe:
    """`load_recipe` of a text that is to be written to `path`."""
    return _recipe(path, text, _parsed(text, path, "recipe"))


def _recipe(path: Path, text: str, data: dict[str, Any]) -> Recipe:
    raise_faults(path, text, typed_secrets.faults(data))  # first: other faults show the value
    try:
        return parse_recipe(data)
    except ValidationError as error:
        raise_faults(path, text, faults_of(error, RecipeFile))
        raise AssertionError("a validation error without a fault") from error


def read(path: Path, kind: str, hint: str) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and its content. Raises InputError."""
    try:
        with path.open(encoding="utf-8-sig") as stream:  # some editors begin a file with a byte order mark
            text = stream.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError as error:
        raise InputError(f"there is no {kind} here", where=str(path), hint=near_files.hint(path, hint)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"this {kind} is not UTF-8 text", where=f"{path}, byte {error.start}", hint="save it as UTF-8") from error
    except OSError as error:
        hint = f"ls -ld {shlex.quote(str(path))}"
        raise InputError(f"this {kind} cannot be read: {error.strerror}", where=str(path), hint=hint) from error
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"this {kind} is far too large", where=f"{path}, over {_MOST_CHARACTERS} characters", hint=hint)
    return text, _parsed(text, path, kind)


def _parsed(text: str, path: Path, kind: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(not_deep(text, str(path)))
    except (ValueError, RecursionError) as error:  # a number of over 4300 digits is a plain ValueError
        hint = "texts need quotes, lists need [ ], and every [section] stands on its own line"
        raise InputError(f"this {kind} is not valid TOML: {error}", where=str(path), hint=hint) from error
    raise_faults(path, text, list(_unusable(data)))
    return data


# Files of this machine, by their section and key; a folder of `~` in [model] name is one of the nodes.
_OWN_FILES = {
    ("cluster", "known_hosts"), ("defaults", "identity_file"), ("nodes", "identity_file"), ("notify", "apprise"), ("data", "train"), ("data", "eval"),
    ("model", "adapter"), ("script", "path"), ("script", "files"),
}  # fmt: skip


def _unusable(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[Fault]:
    """What TOML (of Python) can hold and nothing here can work with; the functions that would meet it first give no clear error."""
    if isinstance(value, str):
        if "\0" in value:  # in no file name, command or setting
            yield place, 'the character "\\u0000" cannot be used'
        words = [part for part in place if isinstance(part, str)]
        if value.startswith("~") and (words[0], words[-1]) in _OWN_FILES and os.path.expanduser(value) == value:
            account = value[1:].partition("/")[0]
            yield place, f'this machine has no account "{account}"; a file of your home begins with ~/: "~/{value[1:]}"'
    elif isinstance(value, int):
        if abs(value) > _LARGEST:
            yield place, f"this number is too large; allowed: up to {_LARGEST}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _unusable(key, (*place, key.replace("\0", "")))
            yield from _unusable(inner, (*place, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unusable(inner, (*place, index))


def _table(data: dict[str, Any], key: str, faults: list[Fault]) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        faults.append(((key,), f"[{key}] is a section with keys"))
        return {}
    return dict(table)


def _section(data: dict[str, Any], key: str, model: type[Section], faults: list[Fault]) -> Section:
    try:
        return model(**_table(data, key, faults))
    except ValidationError as error:
        faults += [((key, *location), message) for location, message in faults_of(error, model)]
        return model()


def _nodes(data: dict[str, Any], defaults: dict[str, Any], faults: list[Fault]) -> list[Node]:
    entries = data.get("nodes", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        faults.append((("nodes",), "each machine is a section that starts with [[nodes]] (two brackets)"))
        return []
    if not entries:
        faults.append((("nodes",), "there is no machine: add a [[nodes]] section with name and host"))
    nodes = []
    blamed_defaults: set[tuple[str | int, ...]] = set()
    for index, entry in enumerate(entries):
        try:
            nodes.append(Node.model_validate(_with_defaults(defaults, entry)))
        except ValidationError as error:
            for location, message in faults_of(error, Node):
                if _is_inherited(location, defaults, entry):
                    if location not in blamed_defaults:
                        faults.append((("defaults", *location), message))
                    blamed_defaults.add(location)
                else:
                    faults.append((("nodes", index, *location), message))
    return nodes


def _is_inherited(location: tuple[str | int, ...], defaults: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether what stands there comes from [defaults]."""
    key, inner = (location[0] if location else ""), location[1:2]
    if key == "environment" and inner and isinstance(entry.get(key), dict):
        return inner[0] not in entry[key]
    return key in defaults and key not in entry


def _with_defaults(defaults: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """A node's keys win over the defaults; of `environment`, each variable by itself."""
    both = [table["environment"] for table in (defaults, entry) if isinstance(table.get("environment"), dict)]
    merged = {"environment": both[0] | both[1]} if len(both) == 2 else {}
    return {**defaults, **entry, **merged}


def _clashes(nodes: list[Node]) -> list[Fault]:
    """Two machines that claim to be one: the second start would land on the first machine."""
    faults: list[Fault] = []
    owners: dict[tuple[str, str], str] = {}
    for index, node in enumerate(nodes):
        claims = [("name", node.name), ("host", f"{node.host}:{node.port}")]
        if node.lan_address:
            claims.append(("lan_address", node.lan_address))
        for key, value in claims:
            if (key, value) in owners:
                faults.append((("nodes", index, key), f'{key} "{value}" is already that of node "{owners[key, value]}"'))
            owners.setdefault((key, value), node.name)
    return faults


def _beside(path: Path, other: str) -> Path:
    return (path.resolve().parent / Path(other).expanduser()).resolve()


def _absolute_identity(path: Path, node: Node) -> Node:
    return node.model_copy(update={"identity_file": node.identity_file and str(_beside(path, node.identity_file))})


_PLACE = re.compile(r"recipe(?:, \[(\w+)\](?: (\w+))?)?")


def in_file(where: str, recipe: Path) -> str:
    """`recipe, [train] seq_len` of who has no file (the planner) as `RECIPE.toml, line 12, [train] seq_len`; any other place as it is."""
    place = _PLACE.fullmatch(where)
    if place is None:
        return where
    try:
        text = recipe.read_text(encoding="utf-8-sig")[:_MOST_CHARACTERS]
    except (OSError, ValueError):  # it was there a moment ago
        text = ""
    number = line_of(key_lines(text), tuple(part for part in place.groups() if part))
    return f"{recipe}{f', line {number}' if number else ''}{where.removeprefix('recipe')}"


def cluster_text(cluster: Cluster) -> str:
    """What `homelab.controller.config.load.load_cluster` reads as the same cluster."""
    import tomlkit  # here: a supervisor on a head node does without it

    content = cluster.model_dump(mode="json", exclude={"left_out"}, exclude_none=True)
    nodes = content.pop("nodes")
    sections = {name: content.pop(name) for name in ("energy", "notify")} | {"network": content.pop("wire")}
    return tomlkit.dumps({"cluster": content, **sections, "nodes": nodes})
