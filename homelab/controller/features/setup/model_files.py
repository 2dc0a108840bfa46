"""Which files of a base model a node needs, and what of them it lacks. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import decimal_size, listed
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.shared.protocol.setup_messages import ModelState

# What transformers reads (tokenizers, configuration, templates) and safetensors; no weights of other frameworks, and no pickles beside safetensors.
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.bin")
_SPARE_BYTES = 200_000_000  # for what else writes to that disk meanwhile
_LAST = "config.json"


def needed(names: Iterable[str]) -> list[str]:
    """Of the names of a model's folder those that are sent, the configuration last: without it the folder is no model yet."""
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS)]
    if any(name.endswith(".safetensors") for name in chosen):
        chosen = [name for name in chosen if not name.endswith(".bin") and not name.endswith(".bin.index.json")]
    return sorted(chosen, key=lambda name: (name == _LAST, name))


def lacking(node: str, state: ModelState, parts: Sequence[NeededFile]) -> list[NeededFile]:
    """The files that this node needs. Raises HomelabError where other files have their names, or the disk has no room."""
    if state.others:
        raise HomelabError(
            f"{listed(state.others)} of another model {'is' if len(state.others) == 1 else 'are'} there", where=f"node {node}, {state.folder}",
            hint=Hint("move that folder away there, or edit the recipe: [model] name = another folder; then: {}", homelab("setup --recipe FILE")),
        )  # fmt: skip
    missing = [part for part in parts if part.name not in state.good]
    needed_bytes = sum(part.size_bytes - min(state.partial.get(part.name, 0), part.size_bytes) for part in missing)
    if missing and state.disk_free < needed_bytes + _SPARE_BYTES:
        raise HomelabError(
            f"the disk has {decimal_size(state.disk_free)} free, and the model needs {decimal_size(needed_bytes + _SPARE_BYTES)}", where=f"node {node}, {state.folder}",
            hint=Hint("make room there, or edit the recipe: [model] name = a folder on another disk; then: {}", homelab("setup --recipe FILE")),
        )  # fmt: skip
    return missing
