"""What a page may do with a run, by POST (`posted.py`): begin one of two commands."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from homelab.controller.base.errors import BusyError, HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.web import event_stream, page_values, posted
from homelab.controller.features.web.act_words import Act
from homelab.controller.features.web.observer import Observer
from homelab.controller.features.web.posted import Name, Posted
from homelab.controller.features.web.run_acts import RunActs
from homelab.controller.run import run_names

OPEN = "This page is open to your network without encryption, so its buttons do not act: type the command."
_MOST_BODY = 5000  # bytes: a name has at most 200 letters, and a letter at most twelve bytes


class Wanted(Posted):
    """The command, and the whole name of the run."""

    run: Name
    act: Act


class ActRequests:
    """The answers of a server to its pages."""

    def __init__(self, acts: RunActs, observer: Observer) -> None:
        self._acts, self._observer = acts, observer

    def may(self) -> str:
        """Whether the buttons of a page act; else why not, in a sentence."""
        return json.dumps({"does_act": self._acts.does_act, "why_not": "" if self._acts.does_act else OPEN})

    async def act(self, request: Request) -> Response:
        """A stream with one event a line, until the command's end. 403 with `--lan`, 404 for no run of ours, 409 where one is under way."""
        if not self._acts.does_act:
            hint = Hint("type the command that the page shows; or open the page to this machine alone: {}", homelab("web"))
            return _refused(403, HomelabError("a page that is open to the network does not act", where="homelab web --lan", hint=hint))
        wanted = await posted.read(request, Wanted, _MOST_BODY, "This is longer than the name of a run.")
        try:
            if await self._observer.run(wanted.run) != wanted.run:  # a part of a name may mean another run tomorrow
                raise run_names.unknown(wanted.run, self._observer.names())
            begun = self._acts.begin(wanted.run, wanted.act)
        except HomelabError as error:
            return _refused(409 if isinstance(error, BusyError) else 404 if isinstance(error, InputError) else 503, error)
        return event_stream.answer(event_stream.follow(begun.events))


def _refused(status: int, error: HomelabError) -> Response:
    told = page_values.failed(error.message, error.where, str(error.hint))
    return Response(told.encode("utf-8", "replace"), status, media_type="application/json")
