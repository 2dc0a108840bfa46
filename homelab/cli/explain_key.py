"""`homelab explain recipe.train.lr_scale`: a section of a file, or one of its keys, from the reference."""

from __future__ import annotations

from typing import Any

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.config import reference, schema

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a table",
}
_LIMITS = {
    "minimum": "at least {}", "exclusiveMinimum": "more than {}", "maximum": "at most {}", "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters", "maxLength": "at most {} characters",
}  # fmt: skip


def is_key(query: str) -> bool:
    """Whether this asks for a section or a key, known or not."""
    return query == "suite" or (query.partition(".")[0] in reference.SECTIONS and "." in query)


def document(query: str) -> dict[str, Any]:
    """The section or the key as JSON. Raises InputError for one that is not known."""
    page, key = _found(query)
    shape = schema.section(page.name)
    if key is None:
        return {"section": page.name, "description": page.description, "keys": [_entry(page, one, shape) for one in page.keys]}
    return _entry(page, key, shape)


def text(query: str) -> str:
    """The section as its commented TOML, or the lines of one key. Raises InputError for one that is not known."""
    page, key = _found(query)
    if key is None:
        return f"{page.text.rstrip()}\n\nTo read one key: homelab explain {page.name}.{page.keys[0].name}"
    entry = _entry(page, key, schema.section(page.name))
    lines = [f"{page.name}.{key.name}", f"  {key.description}", "", f"  type     {entry['type']}"]
    lines += [f"  allowed  {entry['allowed']}"] if entry["allowed"] else []
    lines += [f"  default  {entry['default']}", f"  example  {entry['example']}", "", f"All of the section: homelab explain {page.name}"]
    return "\n".join(lines)


def sections(kind: str) -> str:
    """The sections of a file, a line each."""
    pages = [reference.page(name) for name in reference.names() if name.partition(".")[0] == kind]
    width = max(len(page.name) for page in pages)
    return "\n".join(f"  {page.name:<{width}}  {page.description.partition('. ')[0].rstrip('.')}" for page in pages)


def _found(query: str) -> tuple[reference.SectionPage, reference.Key | None]:
    name = next((name for name in reference.names() if query == name or query.startswith(f"{name}.")), None)
    if name is None:
        near = did_you_mean(".".join(query.split(".")[:2])[:100], reference.names())
        raise InputError(
            f'there is no section "{query[:100]}".{near}',
            where="the argument of homelab explain",
            hint=f"homelab explain {query.partition('.')[0]}",
        )
    page = reference.page(name)
    if query == name:
        return page, None
    asked = query.removeprefix(f"{name}.")
    key = next((key for key in page.keys if key.name == asked), None)
    if key is None:
        near = did_you_mean(asked[:100], [one.name for one in page.keys])
        raise InputError(
            f'[{name}] has no key "{asked[:100]}".{near}', where="the argument of homelab explain", hint=f"homelab explain {name}"
        )
    return page, key


def _entry(page: reference.SectionPage, key: reference.Key, shape: dict[str, Any]) -> dict[str, Any]:
    found = shape.get("properties", {}).get(key.name, {"type": "string"})
    is_needed = key.name in shape.get("required", ())
    default = "none: the key is required" if is_needed else key.written if "default" in found else "left out"
    return {
        "key": f"{page.name}.{key.name}", "description": key.description, "type": _type(found), "allowed": _allowed(found), "default": default,
        "example": f"{key.name} = {key.written}",
    }  # fmt: skip


def _type(shape: dict[str, Any]) -> str:
    branches = shape.get("anyOf", [shape])
    return " or ".join(
        dict.fromkeys(_TYPES.get(branch.get("type", "object" if "$ref" in branch else "string"), "a text") for branch in branches)
    )


def _allowed(shape: dict[str, Any]) -> str:
    parts = []
    for branch in (shape, *shape.get("anyOf", ()), *([shape["items"]] if isinstance(shape.get("items"), dict) else ())):
        words = branch.get("enum", [branch["const"]] if "const" in branch else [])
        parts += [f'"{word}"' for word in words]
        parts += [words_of.format(branch[name]) for name, words_of in _LIMITS.items() if name in branch]
    return ", ".join(dict.fromkeys(parts))
