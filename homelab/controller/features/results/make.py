"""A program of the worker at work on a node, followed line by line: it ends with this command."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.base.models import WireModel
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.decoding import decoded
from homelab.shared.protocol import result_files
from homelab.shared.protocol.request import RunRequest

_SILENT_S = 60.0  # the node says a line every few seconds


def run_node_program(agent: Agent, program: str, request: dict[str, Any], say: Say) -> Made:
    """Run `program` ("model_export", "merge" or "gguf") there, and say its progress. Raises its error in three parts, UnreachableError."""
    name = agent.node.name
    agent.ask("result-look", RunRequest(run=request["run"]))  # the code is shipped
    stream = agent.open("result-make", {**request, "program": program})
    try:
        while True:
            try:
                line = stream.readline(_SILENT_S)
            except (TimeoutError, OSError) as error:
                raise UnreachableError("the node fell silent", where=f"node {name}", hint=homelab("preflight --nodes", name)) from error
            message = _message(line, name)
            if "error" in message:
                raise _error(message["error"], name)
            if "made" in message:
                return _made(message["made"], name)
            if message.get("say"):
                say(f"{name}: {plain_lines(str(message['say']))[:300]}")
    finally:
        stream.close()


def _message(line: bytes, name: str) -> dict[str, Any]:
    try:
        message = decoded(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise HomelabError("the program ended without an answer", where=f"node {name}", hint=homelab("preflight --nodes", name))
    return message


def _made(made: Any, name: str) -> Made:
    try:
        return Made.model_validate(made)
    except ValidationError as error:
        raise HomelabError(
            "the program's answer is not in the form of homelab", where=f"node {name}", hint=homelab("preflight --nodes", name)
        ) from error


def _error(parts: Any, name: str) -> HomelabError:
    parts = parts if isinstance(parts, dict) else {}
    where = plain_lines(str(parts.get("where") or ""))
    kind = InputError if parts.get("kind") == "input" else HomelabError
    hint = advice(name, parts.get("hint")) or homelab("preflight --nodes", name)
    return kind(
        plain_lines(str(parts.get("message") or "")) or "the program failed", where=f"node {name}{', ' if where else ''}{where}", hint=hint
    )


class Made(WireModel):
    """The end of `result-make`: what the program has made, in its own words."""

    folder: Annotated[str, Field(max_length=200)]
    notes: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)] = ()
    figures: Annotated[dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=100)] = {}

    @field_validator("folder")
    @classmethod
    def _known(cls, folder: str) -> str:
        return result_files.folder(folder)
