"""The chat templates that TRL trains with in the place of a model's own: they mark what the assistant says, and keep what it thought in every turn.

A template of a model that drops its earlier thoughts (Qwen3, DeepSeek-R1), or has the end of a turn in the next one (GLM-4-MoE), cannot say
which tokens the model has to learn. TRL's package carries both (trl/chat_templates, NAME.jinja and NAME_training.jinja; tried with 1.16.0). They are
read as files: TRL itself is not imported. Rows that another release would encode otherwise are refused by their digest, as any other change of them.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from homelab.worker.errors import WorkerError

_TRAINING = "_training"


def name_of(own: str) -> str | None:
    """TRL's name of a model's own template; None for one that TRL does not know, or trains with as it is. Raises WorkerError if TRL is not installed."""
    return _names().get(own)


def load(name: str) -> str:
    """The template to train with. Raises WorkerError if TRL is not installed."""
    return (_folder() / f"{name}{_TRAINING}.jinja").read_text(encoding="utf-8")


@functools.cache
def _names() -> dict[str, str]:
    """The model's own template -> its name. As in TRL, another text is another template."""
    names = [path.stem.removesuffix(_TRAINING) for path in sorted(_folder().glob(f"*{_TRAINING}.jinja"))]
    own = {name: _folder() / f"{name}.jinja" for name in names}
    return {path.read_text(encoding="utf-8"): name for name, path in own.items() if path.is_file()}


@functools.cache
def _folder() -> Path:
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found is not None and found.origin else None
    if folder is None or not folder.is_dir():
        raise WorkerError(
            "the package trl is not installed here, or has no chat templates: it says which tokens of a chat are learned", where="[data] completion_only",
            hint="homelab setup installs it on the nodes; by hand: pip install 'trl>=1.15' in the environment that cluster.toml names",
        )  # fmt: skip
    return folder
