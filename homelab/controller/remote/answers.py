"""What each verb of the agent may answer. A node that says anything else is not believed: its words become paths and commands here. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.shared.protocol.checkpoint_messages import Checkpoints, HasFile, Manifest
from homelab.shared.protocol.collective_messages import CollectiveLook
from homelab.shared.protocol.message import REQUIRED, Message, as_json, defaults
from homelab.shared.protocol.network_messages import Dials, PacketSent, Port
from homelab.shared.protocol.owner_messages import Claimed
from homelab.shared.protocol.result_messages import ResultFiles, Results, RunFolders, SavedFiles
from homelab.shared.protocol.run_messages import Described, Energies, Reply, Runs, Stacks, Stopped, SupervisorLook
from homelab.shared.protocol.setup_messages import ModelState, SetupMade, SetupReceived, SetupRemoved, SetupShared, SetupState
from homelab.shared.protocol.supervisor_messages import SupervisorEnded, SupervisorNeeds, SupervisorReach, SupervisorStarted
from homelab.shared.protocol.worker_messages import Answer, BuildAnswer, DryRuns, SampleOfData

SHAPES: dict[str, type[BaseModel] | type[Message]] = {
    "facts": Facts, "wake": PacketSent, "poll": Reply, "runs": Runs, "describe": Described, "stop": Stopped, "undo": Stopped, "claim": Claimed, "stacks": Stacks,
    "free-port": Port, "meet": Dials, "has-file": HasFile, "checkpoints": Checkpoints, "chat": Answer, "dry-run": DryRuns, "sample-data": SampleOfData, "build-model": BuildAnswer,
    "collective-look": CollectiveLook, "collective-end": Stopped, "manifest": Manifest, "energies": Energies,
    "supervisor-needs": SupervisorNeeds, "supervisor-reach": SupervisorReach, "supervisor-start": SupervisorStarted,
    "run-weigh": RunFolders, "result-files": ResultFiles, "saved-files": SavedFiles, "result-look": Results, "supervisor-look": SupervisorLook, "supervisor-end": SupervisorEnded,
    "model-look": ModelState, "model-receive": SetupReceived, "setup-look": SetupState, "setup-receive": SetupReceived, "setup-fetch": SetupReceived, "setup-share": SetupShared,
    "setup-make": SetupMade, "setup-remove": SetupRemoved,
}  # fmt: skip


def without_damage(verb: str, answer: Any) -> Any:
    """The answer without what damaged files on the node gave to it, where it is used as it is; `poll` is read through its models."""
    try:
        return as_json(read(Runs, answer)) if verb == "runs" else answer
    except ValidationError:
        return answer


def with_defaults(verb: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with all keys of its shape: who reads one finds it, whatever the node has left out."""
    shape = SHAPES.get(verb)
    if shape is None:
        return answer
    if issubclass(shape, Message):
        left_out = {name: value for name, value in defaults(shape).items() if value is not REQUIRED}
    else:
        left_out = {
            name: field.get_default(call_default_factory=True) for name, field in shape.model_fields.items() if not field.is_required()
        }
    return {name: value.model_dump() if isinstance(value, BaseModel) else as_json(value) for name, value in left_out.items()} | answer


def fault(verb: str, answer: Any) -> str | None:
    """None for an answer that can be used, else what is wrong with it."""
    if not isinstance(answer, dict):
        return "it is no JSON object"
    shape = SHAPES.get(verb)
    try:
        if shape is not None and issubclass(shape, Message):
            read(shape, answer)
        elif shape is not None:
            shape.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{where}{': ' if where else ''}{message[0].lower()}{message[1:]}"
    return None
