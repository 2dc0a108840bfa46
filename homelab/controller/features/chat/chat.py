"""One question to the model of a run, asked where the model lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homelab.controller.base.errors import HomelabError, InputError, NoRoomError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain, plain_text
from homelab.controller.base.say import Say
from homelab.controller.features.chat import stage_chat
from homelab.controller.planning.strategy import registry
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, store
from homelab.controller.run.paths import RunPaths

ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ChatAnswer:
    """What the model said on `node`; `reply` as the node tells it."""

    node: str
    reply: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The model's words."""
        return plain_text(str(self.reply["answer"]))

    @property
    def notes(self) -> list[str]:
        """What the model was loaded on."""
        return [plain(str(note)) for note in self.reply.get("notes") or ()]

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {"node": self.node, **self.reply}


def ask(fleet: Fleet, paths: RunPaths, prompt: str, *, base: bool, max_new_tokens: int, say: Say = lambda text: None) -> ChatAnswer:
    """From the head, or from another node that has a checkpoint when the head cannot be asked; across the stages of a pipeline where the head
    has no room for the whole model.

    Raises the head's error when nobody can answer.
    """
    request = {"run": paths.name, "prompt": prompt, "base": base, "max_new_tokens": max_new_tokens, "timeout_s": ANSWER_TIMEOUT_S}
    first: HomelabError | None = None
    for name in nodes_to_ask(paths):
        try:
            answer = fleet.agent(name).ask("chat", request, timeout_s=ANSWER_TIMEOUT_S + 20)
        except NoRoomError as error:
            plan = run_folder.plan_of(paths)
            if not registry.of_plan(plan).cuts_layers:
                first = first or error
                continue
            question = {"prompt": prompt, "base": base, "max_new_tokens": max_new_tokens}
            name, answer = stage_chat.ask(fleet, plan, question, because=error.message, say=say)
        except HomelabError as error:
            first = first or error
            continue
        except KeyError:
            continue
        reply = ChatAnswer(name, answer)
        store.append_lines(paths.answers_jsonl, [{"prompt": prompt, "base": base, "answer": reply.text}])  # for `homelab report`
        return reply
    raise first or HomelabError("none of the run's nodes is in cluster.toml", where=paths.name, hint=homelab("runs"))


def nodes_to_ask(paths: RunPaths) -> list[str]:
    """The run's nodes, its head first. Raises InputError for a [script], and for a model that scores."""
    plan = run_folder.plan_of(paths)
    run_folder.refuse_scores(paths)
    if run_folder.description_of(paths).recipe.model is None:
        raise InputError(
            "this run used a [script]: only that program can ask its model",
            where=paths.name,
            hint=Hint("look for its files below the run's folder on the nodes: {}", homelab("status")),
        )
    return [plan.head, *(node.name for node in plan.nodes if node.name != plan.head)]
