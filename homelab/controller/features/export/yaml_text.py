"""A value as YAML that every parser reads alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def text(value: object, comments: Sequence[str]) -> str:
    """The document below its comments. Strings that YAML would take for something else ("no", "1e3", "012") are quoted."""
    import yaml

    return "\n".join([*comments, yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=4096)])


def named_values(variables: Mapping[str, str]) -> list[dict[str, object]]:
    """Environment variables as Kubernetes lists them."""
    return [{"name": name, "value": value} for name, value in sorted(variables.items())]
