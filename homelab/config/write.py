"""A cluster as the text of a cluster.toml, for a machine that has none."""

from __future__ import annotations

import json
from typing import Any

from homelab.config.cluster import Cluster


def cluster_text(cluster: Cluster) -> str:
    """What `homelab.config.load.load_cluster` reads as the same cluster; every key stands with its node."""
    lines = ["[cluster]", *_keys(cluster.model_dump(include={"name", "network", "known_hosts"}, exclude_none=True))]
    for node in cluster.nodes:
        lines += ["", "[[nodes]]", *_keys(node.model_dump(exclude_none=True))]
    return "\n".join(lines) + "\n"


def _keys(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    # Texts and numbers are written as in JSON; of what TOML forbids in texts, JSON leaves one character as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
