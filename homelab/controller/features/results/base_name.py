"""The base model's name in what others get: its name on the hub, never a folder of a node. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab

TEXT = (".json", ".md", ".jinja", ".txt")


def unnamed(folder: str, run: str, repository: str) -> InputError:
    """The refusal of a push where nobody could load the base."""
    return InputError(
        f"the recipe names a folder as the base model ({folder}), which nobody else has", where=f"{run}: [model] name",
        hint=Hint("say what it is called on the hub: {}", homelab("push --base-model ORGANISATION/MODEL", run, repository)),
    )  # fmt: skip


def replaced(text: str, folders: Collection[str], name: str) -> str:
    """The text with the hub's name in place of the folders, also as they stand in JSON strings; the longest first, since one may begin as another."""
    for folder in sorted({folder.rstrip("/") for folder in folders} - {"", name}, key=len, reverse=True):
        for form in (folder, json.dumps(folder)[1:-1]):
            text = text.replace(form, name)
    return text


def in_card(text: str, name: str) -> str:
    """The model card with the hub's name: `homelab.worker.checkpoints.model_card` writes only the last part of a folder's."""
    front = re.match(r"---\n(?:.*\n)*?base_model: (.*)\n", text)
    if front is None:
        return text
    try:
        shown = str(json.loads(front[1]))
    except ValueError:
        shown = front[1].strip()
    text = text[: front.start(1)] + json.dumps(name) + text[front.end(1) :]
    return text.replace(f"\n`{shown}` fine-tuned", f"\n`{name}` fine-tuned", 1)
