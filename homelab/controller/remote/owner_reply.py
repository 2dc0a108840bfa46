"""What a node says of who acts on a run (`homelab.node.run.ownership` writes this JSON; here it gets types). Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WrapValidator

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain

_Name = Annotated[str, Field(max_length=400), AfterValidator(plain)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Follower(WireModel):
    """A supervisor that follows the run over the network, here or elsewhere. `process` is read by `homelab.controller.run.process_owner`."""

    by: _Name = ""
    process: dict[str, Any] = {}
    silent_s: _Seconds
    has_left: bool = False


class Claimant(WireModel):
    """Who has claimed the run, to start it or to go on with it. `process` as above."""

    by: _Name = ""
    doing: _Name = ""
    age_s: _Seconds
    process: dict[str, Any] = {}


def _or_none(value: Any, read: Any) -> Any:
    try:
        return read(value)
    except ValueError:
        return None


class Owner(WireModel):
    """All of it. `stopped_attempt`: the newest attempt when the run was stopped by hand last; None where it was not."""

    supervisor: Annotated[Follower | None, WrapValidator(_or_none)] = None
    claim: Annotated[Claimant | None, WrapValidator(_or_none)] = None
    stopped_attempt: Annotated[int | None, WrapValidator(_or_none)] = None
