"""What nodes answer about a run, and what a supervisor on a node wrote down. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain
from homelab.controller.facts.reading import read
from homelab.shared.protocol.marks import LATEST
from homelab.shared.protocol.run_messages import Reply


def is_moment(value: Any) -> bool:
    """Whether this can be a time in seconds since 1970."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST


def or_none(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """A damaged file gives no value."""
    try:
        return read(value)
    except ValidationError:
        return None


Line = Annotated[str, AfterValidator(plain)]
LineOrEmpty = Annotated[str, WrapValidator(lambda value, read: or_none(value, read) or ""), AfterValidator(plain)]
Moment = Annotated[float, Field(ge=0, lt=LATEST, allow_inf_nan=False)]
MomentOrNone = Annotated[Moment | None, WrapValidator(or_none)]


class Event(WireModel):
    """One line of a supervisor's events.jsonl; `time` in seconds since 1970, by the clock of its node."""

    time: Moment
    what: Line
    event: Line = ""
    attempt: int | None = None
    step: int | None = None
    state: Line = ""
    title: Line = ""
    kind: Line = ""
    because: Line = ""
    cause: Line | None = None
    hint: Line | None = None
    nodes: tuple[Line, ...] = ()
    left_out: tuple[Line, ...] = ()
    ranks: tuple[int, ...] = ()
    saved: Line = ""


def event_of(line: dict[str, Any]) -> dict[str, Any] | None:
    """What a supervisor on a node wrote down, made harmless; None when it is not whole."""
    try:
        return Event.model_validate(line).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return None


def parse_replies(raw: dict[str, dict[str, Any]]) -> dict[str, Reply]:
    """Node -> its answer, from decoded JSON. Raises pydantic.ValidationError when an agent speaks another language."""
    return {node: read(Reply, reply) for node, reply in raw.items()}
