"""What `homelab verify` has found, as a value, and what a reader has to know of how much was looked at. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from homelab.controller.base.models import Value
from homelab.controller.features.verify.step_record import RecordFault, StepRecord, missed_chance
from homelab.controller.features.verify.window_verdict import Verdict, WindowResult

_FORGED = 0.05  # the share of forged windows for which the odds are said


class Verification(Value):
    """What came out. `windows`: those that were to be computed again; `window_count`: all there are; `by_hand`: a person chose; `card_end`: of the chain, ""
    where there is no model card yet.
    """

    run: str
    answer: str
    verdict: Verdict
    precision: str
    last_step: int
    chain: str
    card_end: str
    node: str
    faults: tuple[RecordFault, ...] = ()
    windows: tuple[WindowResult, ...] = ()
    window_count: int = 0
    by_hand: bool = False
    notes: tuple[str, ...] = ()


def notes_of(record: StepRecord, card_end: str, results: Sequence[WindowResult], count: int, *, by_hand: bool) -> list[str]:
    """What a reader has to know of how much was looked at."""
    done = len(results)
    notes = []
    if not count:
        notes.append("no checkpoint was kept, so no step can be computed again: [checkpoint] keep_every in the recipe keeps them")
    elif done and not by_hand:
        forged = max(1, round(_FORGED * count))
        chance = missed_chance(done, count, forged)
        notes.append(
            f"the end of the chain chose {done} of {count} windows; if {forged} of them {'were' if forged > 1 else 'was'} forged, such a choice would"
            f" miss {'all of them' if forged > 1 else 'it'} with {chance:.0%}"
        )
    elif done:
        notes.append("a person chose the steps; without --steps the end of the chain chooses them")
    if not card_end:
        notes.append(f"there is no model card yet: that the record goes on to step {record.last_step} and no further is not checked")
    notes.append("the record's chain shows later edits alone; steps that were not computed again are taken as they are written")
    return [*notes, *dict.fromkeys(note for result in results for note in result.notes)]
