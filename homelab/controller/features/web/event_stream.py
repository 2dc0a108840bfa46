"""What a page is told after it has asked for something: one event a line, until there are no more, or until the page leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse

_QUIET_S = 5.0  # a stream says a word at least so often, so that both sides notice its end

Event = dict[str, Any]
"""One thing that a page is told, mostly by its only key."""


async def follow(events: asyncio.Queue[Event | None]) -> AsyncGenerator[Event | None, None]:
    """What is told, up to the None that ends it; None says only that we are there."""
    while True:
        try:
            event = await asyncio.wait_for(events.get(), _QUIET_S)
        except TimeoutError:
            yield None
            continue
        if event is None:
            return
        yield event


def answer(events: AsyncGenerator[Event | None, None]) -> StreamingResponse:
    """The events as lines of JSON; an empty line where there is none. They are closed with the stream."""

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(events):
            async for event in events:
                yield (json.dumps(event, ensure_ascii=False) if event else "").encode("utf-8", "replace") + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers={"x-accel-buffering": "no"})
