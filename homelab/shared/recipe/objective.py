"""`[objective]`: what is learned where it is not the next token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from homelab.shared.markers import Above, AtLeast

ObjectiveKind = Literal["dpo", "ipo", "simpo", "orpo"]
_GAMMA = 0.5  # TRL's default (experimental/cpo/cpo_config.py)


@dataclass(frozen=True)
class Objective:
    """Learning from pairs of answers, of which one is better; the definitions and defaults are those of TRL 1.16.

    `beta` says how far the model may move for a preference. `gamma`, of SimPO, is the lead that a better answer shall have.
    """

    kind: ObjectiveKind
    beta: Annotated[float, Above(0)] = 0.1
    gamma: Annotated[float | None, AtLeast(0)] = None

    @property
    def compares_with_base(self) -> bool:
        """Whether the loss asks how the model has moved from its base, the reference."""
        return self.kind in ("dpo", "ipo")

    @property
    def learns_answers(self) -> bool:
        """Whether the better answers themselves are learned too, with their prompts."""
        return self.kind == "orpo"

    @property
    def lead(self) -> float:
        """`gamma`, or its default."""
        return _GAMMA if self.gamma is None else self.gamma

    def __post_init__(self) -> None:
        if self.gamma is not None and self.kind != "simpo":
            raise ValueError(f'`gamma` is of `kind` = "simpo"; "{self.kind}" has none: leave it out')
