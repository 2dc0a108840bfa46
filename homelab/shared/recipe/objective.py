"""`[objective]`: what is learned where it is not the next token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from homelab.shared.markers import Above, AtLeast
from homelab.shared.protocol.row_forms import LABELLED, PREFERENCE

ObjectiveKind = Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward"]
_GAMMA = 0.5  # TRL's default (experimental/cpo/cpo_config.py)


@dataclass(frozen=True)
class Objective:
    """Learning from pairs of answers, of which one is better, or (KTO) from answers that are labelled good or bad; the definitions and defaults are those of TRL 1.16.

    `beta` says how far the model may move for a preference. `gamma`, of SimPO, is the lead that a better answer shall have. The weights, of KTO, say how much a
    good and a bad answer count.
    """

    kind: ObjectiveKind
    beta: Annotated[float, Above(0)] = 0.1
    gamma: Annotated[float | None, AtLeast(0)] = None
    desirable_weight: Annotated[float, AtLeast(0)] = 1.0
    undesirable_weight: Annotated[float, AtLeast(0)] = 1.0

    @property
    def learns_labels(self) -> bool:
        """Whether a row is one answer with its label; else it is two answers."""
        return self.kind == "kto"

    @property
    def scores(self) -> bool:
        """Whether the model learns to give an answer one number, with a head of its own."""
        return self.kind == "reward"

    @property
    def format(self) -> Literal["preference", "labelled"]:
        """What [data] format its rows have."""
        return LABELLED if self.learns_labels else PREFERENCE

    @property
    def rows(self) -> str:
        """What it learns from, in words."""
        return "labelled answers" if self.learns_labels else "pairs of answers"

    @property
    def compares_with_base(self) -> bool:
        """Whether the loss asks how the model has moved from its base, the reference."""
        return self.kind in ("dpo", "ipo", "kto")

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
        if (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0) and not self.learns_labels:
            raise ValueError(f'`desirable_weight` and `undesirable_weight` are of `kind` = "kto"; "{self.kind}" has none: leave them out')
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("`desirable_weight` and `undesirable_weight` are both 0: no answer would be learned")
