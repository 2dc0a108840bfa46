"""`homelab schema`: the JSON Schema of a file, for an editor. It contacts no node."""

from __future__ import annotations

from typing import Annotated

import typer

from homelab.cli import common


def command(kind: Annotated[str, typer.Argument(metavar="cluster|recipe|suite", help="The kind of file.", show_default=False)]) -> int:
    """Print the JSON Schema of cluster.toml, a recipe or a suite. An editor then completes and checks its keys."""
    from homelab.controller.base.errors import InputError, did_you_mean
    from homelab.controller.base.hint import Hint, homelab
    from homelab.controller.base.sanitize import plain_name
    from homelab.controller.config import schema

    if kind not in schema.KINDS:
        raise InputError(
            f'no file is called "{plain_name(kind)}".{did_you_mean(kind, schema.KINDS)}',
            where="the argument of homelab schema",
            hint=Hint("{}, or with one of: cluster, suite", homelab("schema recipe")),
        )
    common.print_json(schema.of(kind))
    return 0
