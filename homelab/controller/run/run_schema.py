"""The number of run.json's form, which is the one promise of compatibility: a run of another number is refused. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import homelab
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint

SCHEMA = 1
# Trees before the promise wrote the same number, and neither of these.
_SINCE_THE_PROMISE = ("moment", "rows")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,39}\Z")
_REVISION = re.compile(r"[0-9a-f]{40}\Z")


def is_known(run_json: Mapping[str, Any]) -> bool:
    """Whether this version reads it, if it is whole."""
    return run_json.get("schema", SCHEMA) == SCHEMA and all(key in run_json for key in _SINCE_THE_PROMISE)


def refuse_other(run_json: Mapping[str, Any], where: str, aside: str) -> None:
    """Raises HomelabError for a run.json that a newer version wrote, or one from before the promise. `aside`: the command that puts the folder aside.

    A run.json that is damaged otherwise passes: other functions name its damage.
    """
    schema = run_json.get("schema", SCHEMA)
    if type(schema) is not int:
        return
    if is_known(run_json) or "schema" not in run_json or not isinstance(run_json.get("recipe"), dict):
        return
    version, own = _known(_VERSION, run_json.get("homelab")), homelab.__version__
    if schema > SCHEMA:
        raise HomelabError(
            f"a newer homelab{f' ({version})' if version else ''} made this run: its run.json has schema {schema}, and this version ({own}) reads schema {SCHEMA}",
            where=where,
            hint=f"install that version or a newer one, then once more: pip install ./homelab_trainer-{version or 'VERSION'}-py3-none-any.whl",
        )
    revision = _known(_REVISION, run_json.get("git_revision"))
    raise HomelabError(
        f"an older homelab made this run, before runs stayed readable: its run.json lacks {' and '.join(_lacking(run_json))}",
        where=where,
        hint=Hint("look at it with the tree that made it (git checkout {}), or put it aside: {}", revision or "REVISION", aside),
    )


def _lacking(run_json: Mapping[str, Any]) -> list[str]:
    return [key for key in _SINCE_THE_PROMISE if key not in run_json] or [f"schema {SCHEMA}"]


def _known(form: re.Pattern[str], value: object) -> str | None:
    return value if isinstance(value, str) and form.match(value) else None
