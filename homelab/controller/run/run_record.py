"""run.json and the plans with types: they may come from a node, and their names become paths and their words become commands. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

import homelab
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.base.models import WireModel
from homelab.controller.config.cluster import is_node_name
from homelab.controller.config.recipe import Recipe, parse_recipe
from homelab.controller.planning.types import Plan
from homelab.shared.protocol import layout

SCHEMA = 1
# Trees before the promise wrote the same number, and neither of these.
_SINCE_THE_PROMISE = ("moment", "rows")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,39}\Z")
_REVISION = re.compile(r"[0-9a-f]{40}\Z")
ROLES = ("train", "eval", "adapter", "script")
_OF_SCRIPT = "script:"
_MOST_FILES = 1000


def inside(place: str) -> str:
    """The place itself, a relative path. Raises ValueError for one that leads out of its folder."""
    if len(place) > 1024 or any(part in ("", ".", "..") for part in place.split("/")) or "\0" in place:
        raise ValueError(f"not a path inside a folder: {place[:100]!r}")
    return place


Inside = Annotated[str, AfterValidator(inside)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Word = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*\z")]


class DataEntry(WireModel):
    """One file of a run, or data of the hub. `path`: on the machine of the launch, or on a node; `name`: the file's, where it was shipped."""

    kind: Literal["file", "hub"]
    sent: Literal["shipped", "on-node", "hub"] = "on-node"
    path: Word
    name: Inside | None
    sha256: Word
    folder: Sha256 | None = None
    inside: Inside | None = None
    config: Word | None = None
    split: Word | None = None
    revision: Word | None = None

    @model_validator(mode="after")
    def _shipped_is_known_by_its_content(self) -> DataEntry:
        if self.sent == "shipped":
            if self.name is None:
                raise ValueError("a shipped file has a name")
            layout.data_file(self.model_dump())
        return self


class RunRecord(WireModel):
    """What of run.json is gone by. `data`: role -> entry; all of a program is shipped."""

    data: Annotated[dict[str, DataEntry | None], Field(max_length=_MOST_FILES)]
    recipe: dict[str, Any]
    recipe_file: Inside | None = None
    recipe_hash: Annotated[str, Field(max_length=100)] | None = None

    @field_validator("data")
    @classmethod
    def _roles(cls, data: dict[str, DataEntry | None]) -> dict[str, DataEntry | None]:
        for role, entry in data.items():
            if role.startswith(_OF_SCRIPT):
                inside(role.removeprefix(_OF_SCRIPT))
            elif role not in ROLES:
                raise ValueError(f"not a role of a file: {role[:100]!r}")
            if role not in ("train", "eval") and entry is not None and entry.sent != "shipped":
                raise ValueError(f"{role[:100]}: it is sent from the machine of the launch")
        return data


def fault(run_json: Mapping[str, Any], *, of_node: bool = False) -> str | None:
    """What is wrong with a run.json, behind its key; None for one that can be used. `of_node`: nothing else tells what its program is."""
    try:
        record = RunRecord.model_validate(run_json)
        recipe = parse_recipe(record.recipe, strict=False)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"[:400]
    if recipe.model is not None and recipe.model.adapter is not None and record.data.get("adapter") is None:
        return "data.adapter: the adapter that the run begins with is not named"
    if of_node and recipe.script is not None and record.data.get("script") is None:
        return "data.script: the run's program is not named"
    return None


def recipe_in(run_json: Mapping[str, Any]) -> Recipe | None:
    """None for what is no whole run.json."""
    return parse_recipe(run_json["recipe"], strict=False) if fault(run_json) is None else None


def scores(run_json: Mapping[str, Any]) -> bool:
    """Whether the run makes a reward model, whether the run.json is whole or not."""
    recipe = run_json.get("recipe")
    objective = recipe.get("objective") if isinstance(recipe, dict) else None
    return isinstance(objective, dict) and objective.get("kind") == "reward"


def digest(run_json: Mapping[str, Any]) -> str:
    """sha256 of what all nodes of a run and the machine of its launch have alike: where the files lie is each machine's own."""
    data = {
        role: {**entry, "path": ""} if entry.get("sent") == "shipped" else entry
        for role, entry in run_json["data"].items()
        if entry is not None
    }
    return hashlib.sha256(json.dumps({**run_json, "data": data}, sort_keys=True).encode()).hexdigest()


def plan_in(value: Any, run: str, number: int) -> Plan | None:
    """None for what is no plan, or that of another run or attempt (a copied folder), or names nodes as none can be called."""
    try:
        plan = Plan.model_validate(value)
    except ValidationError:
        return None
    names = {plan.head, *(node.name for node in plan.nodes), *(rank.node for rank in plan.ranks)}
    return plan if (plan.run, plan.attempt) == (run, number) and all(map(is_node_name, names)) else None


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
            hint=f"install that version or a newer one, then run the command again: pip install ./homelab_trainer-{version or 'VERSION'}-py3-none-any.whl",
        )
    revision = _known(_REVISION, run_json.get("git_revision"))
    raise HomelabError(
        f"an older homelab made this run, in a format that is no longer read: its run.json lacks {' and '.join(_lacking(run_json))}",
        where=where,
        hint=Hint("read it with the version that made it (git checkout {}), or move it away: {}", revision or "REVISION", aside),
    )


def _lacking(run_json: Mapping[str, Any]) -> list[str]:
    return [key for key in _SINCE_THE_PROMISE if key not in run_json] or [f"schema {SCHEMA}"]


def _known(form: re.Pattern[str], value: object) -> str | None:
    return value if isinstance(value, str) and form.match(value) else None
