"""Edits of the text of a cluster.toml that keep every comment and every byte they are not about. Pure.

New sections and keys are put in as text, at a place that does not tear a comment off its line; a value is replaced by tomlkit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit

from homelab.controller.base.errors import InputError
from homelab.controller.config.lines import key_lines

NEW_FILE = """\
# The machines that train together. `homelab init` wrote this file. Run again, it adds new machines and keeps your edits and comments.
[cluster]

[defaults]  # any key of a node may be here: user, port, identity_file, python, workdir, ...
"""

Value = str | int | list[dict[str, Any]]


@dataclass(frozen=True)
class NewNode:
    """A [[nodes]] section to be added. `about`: a comment above its keys (one line, may be empty)."""

    name: str
    host: str
    user: str | None = None
    port: int | None = None
    gpus: tuple[dict[str, str | int | float], ...] = ()
    about: str = ""


def with_nodes(text: str, nodes: Sequence[NewNode]) -> str:
    """The text with these sections at its end. Raises InputError where it has its nodes in another form than sections."""
    for node in nodes:
        keys: dict[str, Value | None] = {
            "name": node.name,
            "host": node.host,
            "user": node.user,
            "port": node.port,
            "gpus": list(node.gpus) or None,
        }
        lines = ["[[nodes]]", *([f"# {node.about}"] if node.about else [])]
        lines += [f"{key} = {_written(value)}" for key, value in keys.items() if value is not None]
        gap = "" if not text or text.endswith(("\n\n", "\r\n\r\n")) else "\n" if text.endswith("\n") else "\n\n"
        added = {key: value for key, value in keys.items() if value is not None}
        text = _valid(
            text + _as_in(text, gap + "\n".join(lines) + "\n"), "the machines as nodes = [...], and homelab adds [[nodes]] sections alone",
            f"make a [[nodes]] section of each machine; or add to the list: {_written([added])[1:-1]}",
        )  # fmt: skip
    return text


def with_network(text: str, network: str) -> str:
    """The text with [cluster] network. Where there is no [cluster], it is the last section. Raises InputError where `cluster` has another form."""
    line = f"network = {_written(network)}  # the LAN of the nodes\n"
    place = key_lines(text).get(("cluster",))
    if place is None:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        return _valid(
            text + _as_in(text, f"{gap}[cluster]\n{line}"),
            "`cluster` without a section [cluster]",
            f"add to it: network = {_written(network)}",
        )
    return _inserted(text, place, line)


def with_keys(text: str, index: int, keys: Mapping[str, Value]) -> str:
    """The text where section `index` (from 0) of [[nodes]] has these values. Raises InputError where it cannot be edited without loss."""
    for key, value in keys.items():
        lines = key_lines(text)
        place = lines.get(("nodes", index, "host"))
        is_new = ("nodes", index, key) not in lines
        text = _valid(
            _inserted(text, place, f"{key} = {_written(value)}\n") if is_new and place else _replaced(text, index, key, value),
            f"`{key}` of machine {index + 1} in a form that homelab cannot change, like [[nodes.{key}]]",
            f"take that out, and write below the machine's host: {key} = {_written(value)}",
        )  # fmt: skip
    return text


def _valid(text: str, form: str, by_hand: str) -> str:
    """The text after an edit. Raises InputError where it is TOML no more, because what it was about stands in another form."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the file has {form}", where="cluster.toml", hint=f"edit cluster.toml: {by_hand}") from error
    return text


def _replaced(text: str, index: int, key: str, value: Value) -> str:
    document = tomlkit.parse(text)
    if tomlkit.dumps(document) != text:  # tomlkit moves [[nodes]] sections together that stand apart
        raise InputError(
            "homelab cannot change this file without moving parts of it", where="cluster.toml, the [[nodes]] sections",
            hint=f"edit cluster.toml: put the [[nodes]] sections one after the other, or write: {key} = {_written(value)}",
        )  # fmt: skip
    section = document["nodes"][index]
    section[key] = _item(value)
    return tomlkit.dumps(document)


def _inserted(text: str, after_line: int, line: str) -> str:
    """The text with one more line behind the line of this number (from 1)."""
    lines = text.splitlines(keepends=True)
    before = "".join(lines[:after_line])
    return before + _as_in(text, ("" if before.endswith("\n") else "\n") + line) + "".join(lines[after_line:])


def _as_in(text: str, added: str) -> str:
    """What is added, with the ends of lines that the file has."""
    return added.replace("\n", "\r\n") if "\r\n" in text else added


def _written(value: Value) -> str:
    return _item(value).as_string()


def _item(value: Value) -> tomlkit.items.Item:
    if not isinstance(value, list):
        return tomlkit.item(value)
    cards = tomlkit.array()
    for entry in value:
        table = tomlkit.inline_table()
        table.update(entry)
        cards.append(table)
    return cards
