"""The packages of the environment that trains with Unsloth: its releases take other versions of transformers, TRL and datasets than the worker."""

from __future__ import annotations

from importlib import resources


def without_torch() -> tuple[str, ...]:
    """Lines of requirements (name==version) for all but torch. Without what they name beside it: not all of that is needed here."""
    lines = resources.files(__package__).joinpath("unsloth-packages.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith(("#", "torch==")))
