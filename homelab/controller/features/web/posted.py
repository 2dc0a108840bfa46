"""What a page sends by POST: JSON of a known form and length. Who may send it is decided before (`guard.py`)."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Posted(BaseModel):
    """Nothing but its own keys, each of its own type."""

    model_config = ConfigDict(strict=True, extra="forbid")


Kind = TypeVar("Kind", bound=Posted)


async def read(request: Request, kind: type[Kind], most_bytes: int, too_long: str) -> Kind:
    """The body. Raises HTTPException where it is no JSON by its name (415), too long (413: the words of `too_long`) or not of this kind (400)."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "This is asked in JSON.")
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > most_bytes:
            raise HTTPException(413, too_long)
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise HTTPException(400, "This is not what the page asks.") from error
