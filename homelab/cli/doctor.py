"""`homelab doctor`: everything that one node reports about itself, for a bug report."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from homelab.cli import common, completion, terminal


def command(
    node: Annotated[str, typer.Argument(help="The node's name.", show_default=False, autocompletion=completion.nodes)],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Print all facts of one node for a bug report, with secrets masked."""
    import platform
    import sys

    from homelab import __version__
    from homelab.controller.base import redact
    from homelab.controller.base.errors import InputError, did_you_mean
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.preflight import gather
    from homelab.controller.remote import ship
    from homelab.controller.remote.fanout import Fleet

    names = [entry.name for entry in common.load_cluster(cluster).nodes]
    if node not in names:
        raise InputError(
            f'no node is called "{node}".{did_you_mean(node, names)}',
            where=f"homelab doctor {node}; {cluster} has {', '.join(names)}",
            hint=homelab("doctor", names[0]),
        )
    loaded = common.load_cluster(cluster, node)
    name = loaded.nodes[0].name
    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        gathered = gather.facts(fleet, recipe=None, material=[], port=29500, say=say)
    error = gathered.unreachable.get(name)
    facts = gathered.facts.get(name)
    document: dict[str, Any] = {
        "homelab": __version__,
        "code": ship.CODE.content_hash(),
        "controller": {"python": sys.version.split()[0], "system": platform.platform()},
        "cluster.toml": loaded.nodes[0].model_dump(mode="json", exclude_defaults=True),
        "answer_seconds": round(gathered.answer_seconds[name], 3) if name in gathered.answer_seconds else None,
        "clock_offset_s": round(gathered.clock_offsets_s[name], 3) if name in gathered.clock_offsets_s else None,
        "facts": facts.model_dump(mode="json") if facts else None,
        "error": error.as_dict() if error else None,
    }
    masked = redact.tree(document)
    if as_json:
        common.print_json(masked)
    else:
        for line in _lines(masked):
            terminal.echo(line)
        terminal.echo(
            f"Names, addresses and paths are not masked: read it before you publish it. Next: homelab preflight --nodes {name}{common.same_options(cluster)}"
        )
    return error.exit_code if error else 0


def _lines(value: Any, indent: int = 0, key: str = "") -> list[str]:
    """JSON as indented lines without quotes and braces: what is empty is left out."""
    import json

    pad = "  " * indent
    if isinstance(value, dict):
        inner = [line for name, entry in value.items() for line in _lines(entry, indent + (1 if key else 0), str(name))]
        return [f"{pad}{key}:", *inner] if key and inner else inner
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return [line for number, entry in enumerate(value) for line in _lines(entry, indent, f"{key} {number}")]
    if value in (None, "", [], {}):
        return []
    text = ", ".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)
    return [f"{pad}{key}: {text}"]
